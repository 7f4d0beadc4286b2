"""Faults that can be switched on in an engine's server: dropped fields, swapped rows, stale state.

Runs in the engine's environment. Each fault is one change to the real server, pipeline or worker, undone by the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from unittest.mock import patch

__all__ = ["ChangedRequests", "Switch"]


class Switch:
    """One fault at a time. faults: name -> creates the context in which the fault is active."""

    def __init__(self, faults: Mapping[str, Callable[[], Any]]) -> None:
        self._faults = faults
        self._stack = contextlib.ExitStack()

    def turn(self, name: str) -> None:
        """Switch to this fault; "" is none."""
        self._stack.close()
        if name:
            self._stack.enter_context(self._faults[name]())


class ChangedRequests:
    """Faults of an engine that uses another latent request than it received.

    module, function: reads the request there, with one argument.
    """

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function

    @contextlib.contextmanager
    def changed(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """change: of a `LatentRequest`."""
        module = import_module(self._module)
        real = getattr(module, self._function)

        def piece(*data: Any) -> Any:
            result = real(*data)
            return dataclasses.replace(result, params=change(result.params))

        with patch.object(module, self._function, piece):
            yield

    def changed_sampling(self, **settings: Any) -> Any:
        return self.changed(
            lambda wanted: dataclasses.replace(wanted, sampling=dataclasses.replace(wanted.sampling, **settings))
        )

    def faults(self) -> Mapping[str, Callable[[], Any]]:
        """Faults of all latent engines, by name."""
        return {
            "drops_a_sigma": self._drops_a_sigma,
            "drops_the_noise": self._drops_the_noise,
            "drops_the_negative_prompt": lambda: self.changed_sampling(negative_prompt=""),
            "drops_the_guidance": lambda: self.changed_sampling(guidance_scale=1.0),
        }

    def _drops_a_sigma(self) -> Any:
        """The first step uses the engine's own sigma."""

        def change(wanted: Any) -> Any:
            sigmas = wanted.sigmas.clone()
            sigmas[0] = 1 - 1e-3
            return dataclasses.replace(wanted, sigmas=sigmas)

        return self.changed(change)

    def _drops_the_noise(self) -> Any:
        """Every sample starts from the noise of another id."""
        return self.changed(
            lambda wanted: dataclasses.replace(wanted, noise_ids=tuple(f"{name}!" for name in wanted.noise_ids))
        )
