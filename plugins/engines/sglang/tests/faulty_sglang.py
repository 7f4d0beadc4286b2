"""SGLang's server with faults that can be switched on, see `external_engines.faults`.

Runs in its environment, on both sides: as the server, and as the bridge that SGLang's worker imports, where the faults
are.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from external_engines.faults import ChangedRequests, Switch
from unirl.engine_host.serving import calls_of
from unirl.models.sd3.bridges.sglang import Sd3InSglang

__all__ = ["BRIDGE", "calls"]

REQUESTS = ChangedRequests("unirl.engines.sglang.stages", "from_bytes")


def calls() -> Mapping[str, Any]:
    """Those of the real server, and `fault`, which switches one on by its name; "" is none."""
    from unirl.engines.sglang import server

    made = server._Server()

    def fault(asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        made._call("fault", asked["name"])
        return None, {}

    return {**calls_of(made), "fault": fault}


class _Faulty(Sd3InSglang):
    """The real bridge. SGLang's worker asks it for encoder lengths, and for nothing before its pipeline is there."""

    @property
    def pipeline(self) -> str:  # type: ignore[override]
        from unirl.engines.sglang.pipeline import RolloutPipeline

        switch = Switch(FAULTS)
        RolloutPipeline.unirl_fault = lambda self, name: switch.turn(name)
        return Sd3InSglang.pipeline


BRIDGE = _Faulty()


def drops_the_sde_steps() -> Any:
    """It is stochastic at the first of them alone."""
    return REQUESTS.changed(lambda wanted: dataclasses.replace(wanted, sde_steps=wanted.sde_steps[:, :1]))


def changes_the_guidance() -> Any:
    return REQUESTS.changed_sampling(guidance_scale=7.0)


@contextlib.contextmanager
def makes_its_own_schedule() -> Iterator[None]:
    """SGLang's sigmas in place of those of the request, in its loop alone."""
    from unirl.engines.sglang.stages import Schedule

    real = Schedule.forward

    def forward(self: Any, batch: Any, server_args: Any) -> Any:
        batch = real(self, batch, server_args)
        batch.scheduler.sigmas = batch.scheduler.sigmas * 0.999
        return batch

    with patch.object(Schedule, "forward", forward):
        yield


@contextlib.contextmanager
def pads_prompts_otherwise() -> Iterator[None]:
    """CLIP gets another number of tokens than the model gives it, as SGLang does by itself."""
    from unirl.models.sd3.bridges.sglang import Sd3InSglang

    real = Sd3InSglang.encoder_lengths

    def lengths(self: Any, tokenizers: Any, sampling: Any) -> Any:
        clip, other_clip, t5 = real(self, tokenizers, sampling)
        return clip - 3, other_clip - 3, t5

    with patch.object(Sd3InSglang, "encoder_lengths", lengths):
        yield


@contextlib.contextmanager
def drops_extra() -> Iterator[None]:
    """SGLang forwards a request without the fields that it does not know."""
    from unirl.engines.sglang import stages

    with patch.object(stages, "PIECE", "something_else"):
        yield


@contextlib.contextmanager
def swaps_rows() -> Iterator[None]:
    """Outputs come back in another order than was asked for."""
    from unirl.engines.sglang import stages

    real = stages.rows_of
    with patch.object(stages, "rows_of", lambda request, **named: real(request, **named)[::-1]):
        yield


@contextlib.contextmanager
def stays_stale() -> Iterator[None]:
    """It says that it took weights, and took none."""
    from unirl.engines.sglang.weights import HeldWeights

    with patch.object(HeldWeights, "unirl_end_full", lambda self, _: setattr(self, "unirl_torn", "")):
        yield


@contextlib.contextmanager
def fails_half_way() -> Iterator[None]:
    """Half of the weights are written when something breaks."""
    from sglang.multimodal_gen.runtime.post_training import weights_updater

    real = weights_updater.load_weights_into_model

    def load(weights: Any, *others: Any) -> None:
        real(list(weights)[:20], *others)
        raise OSError("the memory is gone")

    with patch.object(weights_updater, "load_weights_into_model", load):
        yield


@contextlib.contextmanager
def loses_a_weight() -> Iterator[None]:
    """SGLang writes all weights but one, and calls it a success."""
    from sglang.multimodal_gen.runtime.post_training import weights_updater

    real = weights_updater.load_weights_into_model
    with patch.object(
        weights_updater, "load_weights_into_model", lambda weights, *others: real(list(weights)[1:], *others)
    ):
        yield


def changed_pairs(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """SGLang reads other pairs of an adapter than were sent."""
    from sglang.multimodal_gen.runtime.post_training import weights_updater

    real = weights_updater._group_lora_ab_tensors
    return patch.object(weights_updater, "_group_lora_ab_tensors", lambda tensors: change(real(tensors)))


def names_layers_otherwise() -> Any:
    """As under the prefix that diffusers writes: SGLang binds none of them."""
    return changed_pairs(lambda pairs: {f"transformer.{name}": pair for name, pair in pairs.items()})


def loses_a_layer() -> Any:
    """As where one name is unknown: SGLang skips it, and calls it a success."""
    return changed_pairs(lambda pairs: dict(list(pairs.items())[1:]))


def scales_otherwise() -> Any:
    return changed_pairs(lambda pairs: {name: (a, b * 1.01) for name, (a, b) in pairs.items()})


FAULTS: Mapping[str, Callable[[], Any]] = REQUESTS.faults() | {
    function.__name__: function
    for function in (
        drops_the_sde_steps,
        changes_the_guidance,
        makes_its_own_schedule,
        pads_prompts_otherwise,
        drops_extra,
        swaps_rows,
        stays_stale,
        fails_half_way,
        loses_a_weight,
        names_layers_otherwise,
        loses_a_layer,
        scales_otherwise,
    )
}
