"""An environment from a single Python function, which is called with each answer."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.names import did_you_mean
from unirl.core.plugins.files import module_of_file
from unirl.core.roles import Observation
from unirl.core.specs.check import check_config

from .config import FunctionConfig
from .one_by_one import OneByOne

__all__ = ["FunctionEpisode", "build"]


def build(config: FunctionConfig) -> OneByOne:
    """Raises RecipeError for a file that cannot be run, or has no such function."""
    check_config(config, key="environment")
    name = config.target.rpartition(":")[2]
    digest = hashlib.sha256(str(config.file).encode() + b"\0" + config.file.read_bytes()).hexdigest()[:12]
    try:
        module = module_of_file(config.file, name=f"unirl_environment_{digest}")
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"environment.target: running {config.file} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RecipeError(
            f"environment.target: {config.file} has no function {name!r}{did_you_mean(name, names) or '.'}"
        )

    def make(prompt: str, metadata: Mapping[str, Any], seed: int) -> FunctionEpisode:
        return FunctionEpisode(function, {**metadata, "prompt": prompt, "seed": seed})

    return OneByOne(make)


class FunctionEpisode:
    """Calls the function with those arguments that it names: `answer`, `turn` (from 0), `prompt`, `seed`, and metadata
    of the prompt.

    It returns a text, and the episode goes on; a text and a reward; or None or a number, a reward, and it is over.
    """

    def __init__(self, function: Callable[..., Any], facts: Mapping[str, Any]) -> None:
        self._function, self._facts, self._turn = function, facts, 0

    def start(self) -> Observation:
        return Observation()

    def step(self, answer: str) -> Observation:
        given = {**self._facts, "answer": answer, "turn": self._turn}
        self._turn += 1
        reply = self._function(**self._named(given))
        text, reward = reply if isinstance(reply, tuple) and len(reply) == 2 else (reply, 0.0)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(text, str) and isinstance(reward, Real):
            return Observation(text=text, reward=float(reward))
        if reply is None or isinstance(reply, Real):
            return Observation(reward=float(reply or 0.0), done=True)
        raise TypeError(
            f"function {self._function.__name__!r} returned {reply!r}, expected a text, a text and a "
            "reward, a reward, or None."
        )

    def close(self) -> None:
        """Nothing is held."""

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self._function).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return dict(given)
        required = [one.name for one in parameters if one.default is one.empty]
        if missing := [name for name in required if name not in given]:
            raise TypeError(
                f"function {self._function.__name__!r} takes {missing[0]!r}, expected one of "
                f"{', '.join(sorted(given))}{did_you_mean(missing[0], given) or '.'}"
            )
        return {one.name: given[one.name] for one in parameters if one.name in given}
