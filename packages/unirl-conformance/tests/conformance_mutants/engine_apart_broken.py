"""Engines that say they are programs of their own, hold weights of their own, and are broken in one way: one start
serves all claims of a row, and each fault shows all the same."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from unirl.conformance.doubles import model as latent_model
from unirl.conformance.doubles import text_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import WeightUpdate
from unirl.core.specs.spec import EngineSpec
from unirl.core.types.request import Request
from unirl.core.types.track import Track

from conformance_mutants import (
    engine,
    engine_adapters,
    engine_apart,
    engine_noise,
    engine_rollouts,
    engine_text,
    engine_weights,
)
from conformance_mutants.engine_changes import Changes
from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.mutant import Mutant, mutant, mutants_in

SPLIT, CONDITIONS = "samples-do-not-depend-on-how-a-request-is-split", "returned-conditions-are-those-used"
NOT_SHARED = "inputs-of-one-text-are-not-shared"
OF_PLUGINS = "kernels-and-guidances-of-plugins-are-computed"


# Samples of other rows, with the conditions of those, wherever rows are not in that order.
@mutant(
    claim="every-sample-comes-back-with-its-lineage",
    breaks="gives samples in the order of their prompts the ids of the request",
    also=(CONDITIONS, NOT_SHARED, SPLIT),
)
class SortsItsSamples(CopyingEngine):
    """Makes samples prompt after prompt, and gives them the ids of the request in its own order."""

    def generate(self, request: Request) -> Track:
        by_prompt = sorted(range(request.num_rows), key=lambda row: request.inputs.ids[row])
        return self.named(request, super().generate(request.select(by_prompt)))

    def named(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(
            track,
            sample_ids=request.sample_ids,
            group_ids=request.group_ids,
            parent_ids=request.inputs.ids,
            inputs=request.inputs,
            metadata=request.metadata,
        )


@mutant(
    claim=engine_text.LINEAGE,
    breaks="gives texts in the order of their prompts the ids of the request",
    also=(engine_text.SEEDS,),
)
class SortsItsTexts(SortsItsSamples):
    """The prompt tokens that it echoes are those of the request as well."""

    def named(self, request: Request, track: Track) -> Track:
        segment = dataclasses.replace(track.text, prompt_tokens=request.text.prompt_tokens)
        return super().named(request, dataclasses.replace(track, segment=segment))


@mutant(claim=CONDITIONS, breaks="encodes prompts without their last word", also=(NOT_SHARED, OF_PLUGINS))
class DropsTheLastWord(Changes, CopyingEngine):
    """Of prompts before it encodes them; the conditions that come back are those that it used."""

    def request(self, request: Request) -> Request:
        texts = tuple(text.rpartition(" ")[0] for text in request.inputs.texts)
        return dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, texts=texts))

    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, inputs=request.inputs)


@mutant(
    claim="full-weights-are-used-for-sampling",
    breaks="answers full weights and goes on with those that it had",
    also=(
        engine_weights.HALF_FULL,
        engine_adapters.NEWEST,
        "sleep-and-wake-give-the-same-samples",
        engine_weights.ASLEEP,
    ),
)
class StaysStale(CopyingEngine):
    """Answers full weights, and goes on with those that it had."""

    def write_full(self, update: WeightUpdate) -> dict[str, Tensor]:
        return dict(update.tensors)


@mutant(
    claim=engine_adapters.SCALED,
    breaks="takes adapters, and binds them to no layer",
    also=(engine_adapters.HALF_LORA, engine_adapters.NEWEST, engine_adapters.MENDED),
)
class BindsNoLayer(CopyingEngine):
    """Looks for the layers of adapters under a prefix of its own, finds none, and calls it a success."""

    def write_adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        super().write_adapter(dataclasses.replace(update, tensors={}))
        return dict(update.tensors)


OWN = mutants_in(__name__)
IN_PROCESS = (
    engine_noise.KeepsItsSchedule,
    engine_rollouts.EchoesVersions,
    engine_rollouts.NumbersSamplesItself,
    engine_text.DrawsByPlace,
    engine_adapters.ForgetsTheScale,
    engine_weights.IsMendedByARefusal,
    engine_adapters.StripsPrefixesOfAdapters,
    engine_weights.WritesAsItChecks,
)
"""What is wrong in process is wrong in a program of its own."""
BROKEN: dict[type[Any], Mutant] = {
    **OWN,
    **{
        type(f"{kind.__name__}Apart", (kind, CopyingEngine), {}): dataclasses.replace(
            engine.BROKEN[kind],
            name=f"{engine.BROKEN[kind].name}-apart",
            breaks=f"as a program of its own {engine.BROKEN[kind].breaks}",
        )
        for kind in IN_PROCESS
    },
}
MUTANTS = list(BROKEN.values())


def build(config: Any, *, model: Any, device: Any) -> CopyingEngine:
    """The engine that the config's `use` names."""
    names = {mutant.name: kind for kind, mutant in BROKEN.items()}
    return names.get(config.use, CopyingEngine)(config, model=model)


def catalog() -> Catalog:
    """The engines that are broken, each for one kind of track, and one that is well for each."""
    well = [_spec(engine_apart.SPEC, "apart"), _spec(engine_apart.OF_LATENTS, "apart-latents")]
    broken = [_spec(_like(kind), mutant.name) for kind, mutant in BROKEN.items()]
    return Catalog.of(
        {
            "unirl-apart": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC, text_model.SPEC]),
                unirl_engines=hookimpl(lambda: [*well, *broken]),
            )
        }
    )


def _like(kind: type[Any]) -> EngineSpec:
    is_of_text = issubclass(kind, (SortsItsTexts, engine_text.TextEngine))
    return engine_apart.SPEC if is_of_text else engine_apart.OF_LATENTS


def _spec(like: EngineSpec, name: str) -> EngineSpec:
    return dataclasses.replace(like, name=name, build=f"{__name__}:build")
