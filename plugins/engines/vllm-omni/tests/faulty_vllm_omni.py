"""vLLM-Omni's server with faults that can be switched on, see `external_engines.faults`. Runs in its environment."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from external_engines.faults import ChangedRequests, Switch

__all__ = ["calls"]

REQUESTS = ChangedRequests("unirl.engines.vllm_omni.pipeline", "_piece")


def calls() -> Mapping[str, Any]:
    """Those of the real server, and `fault`, which switches one on by its name; "" is none."""
    from unirl.engines.vllm_omni import server

    switch = Switch(FAULTS)

    def fault(asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        switch.turn(asked["name"])
        return None, {}

    return {**server.calls(), "fault": fault}


def drops_the_sde_steps() -> Any:
    """It is stochastic at two other steps."""
    return REQUESTS.changed(
        lambda wanted: dataclasses.replace(wanted, sde_steps=wanted.sde_steps * 0 + _two_others(wanted.sde_steps))
    )


def _two_others(steps: Any) -> Any:
    import torch

    return torch.tensor([2, 3] if steps[0].tolist() == [0, 1] else [0, 1])


@contextlib.contextmanager
def drops_the_last_word() -> Iterator[None]:
    """Prompts are cut before they are encoded, and reported whole."""
    from unirl.models.sd3.bridges.vllm_omni import Sd3InVllmOmni

    real = Sd3InVllmOmni.encode

    def encode(self: Any, pipeline: Any, prompt: str, sampling: Any) -> Any:
        return real(self, pipeline, prompt.rpartition(" ")[0], sampling)

    with patch.object(Sd3InVllmOmni, "encode", encode):
        yield


@contextlib.contextmanager
def drops_extra_args() -> Iterator[None]:
    """vLLM-Omni forwards a request without the fields that it does not know."""
    from unirl.engines.vllm_omni import pipeline

    real = pipeline._piece

    def piece(parameters: Any) -> Any:
        return real(dataclasses.replace(parameters, extra_args={}))

    with patch.object(pipeline, "_piece", piece):
        yield


@contextlib.contextmanager
def swaps_rows() -> Iterator[None]:
    """Outputs come back in another order than requests."""
    from unirl.engine_host import latent_rows as latent_rows

    real = latent_rows.joined
    with patch.object(latent_rows, "joined", lambda request, found: real(request, found[::-1])):
        yield


@contextlib.contextmanager
def stays_stale() -> Iterator[None]:
    """It says that it took weights, and took none."""
    from unirl.engines.vllm_omni.worker_extension import WorkerExtension

    with patch.object(WorkerExtension, "unirl_load_full", lambda *_: None):
        yield


@contextlib.contextmanager
def fails_half_way() -> Iterator[None]:
    """Half of the weights are written when something breaks."""
    from unirl.engines.vllm_omni.worker_extension import WorkerExtension

    real, count = WorkerExtension._unirl_share, 0

    def share(self: Any, whole: Any, split: Any) -> Any:
        nonlocal count
        count += 1
        if count > 20:
            raise OSError("the memory is gone")
        return real(self, whole, split)

    with patch.object(WorkerExtension, "_unirl_share", share):
        yield


@contextlib.contextmanager
def writes_something_else() -> Iterator[None]:
    """Weights are written to a copy, which it does not compute with."""
    from unirl.engines.vllm_omni import worker_extension

    real, count = worker_extension.held_weights, 0

    def held(module: Any, fused: Any) -> Any:
        nonlocal count
        count += 1
        for name, value, split in real(module, fused):
            yield name, value.clone() if count == 1 else value, split

    with patch.object(worker_extension, "held_weights", held):
        yield


FAULTS: Mapping[str, Callable[[], Any]] = REQUESTS.faults() | {
    function.__name__: function
    for function in (
        drops_the_sde_steps,
        drops_the_last_word,
        drops_extra_args,
        swaps_rows,
        stays_stale,
        fails_half_way,
        writes_something_else,
    )
}
