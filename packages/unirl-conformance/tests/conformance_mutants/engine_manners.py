"""Engines that behave badly in the process of a run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import Status, Track
from unirl.engines.trainside.engine import TrainsideEngine

from conformance_mutants import engine_plain
from conformance_mutants.changes import closes_once, leaves_thread, then, with_segment
from conformance_mutants.engine_changes import LATENT_ONLY, Fields, latents, with_first_media
from conformance_mutants.mutant import Mutant

KINDS = "any-stage-of-its-kind-is-generated-and-another-kind-refused"
CLOSING = "closing-leaves-nothing-running-and-may-be-done-twice"


class CopiesTheWeights(TrainsideEngine):
    def __init__(self, config: Any, *, model: Any, device: Any) -> None:
        super().__init__(config, model=copy.deepcopy(model))
        self._original = model.trainable

    def generate(self, request: Request) -> Track:
        self._model.trainable.train(self._original.training)
        return super().generate(request)


class KeepsTheFirst(TrainsideEngine):
    def __init__(self, config: Any, *, model: Any, device: Any) -> None:
        super().__init__(config, model=model)
        cache = self._encoded
        if config.cached_prompts == 1:
            encode, first = cache._encoded, []

            def encoded(one: Any, *, sampling: Any) -> Any:
                first.append(first[0] if first else encode(one, sampling=sampling))
                return first[-1]

            cache._encoded = encoded


def drops_out(engine: Any, generate: Any, request: Request) -> Track:
    engine._check(request)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return engine._latents(request)


def knows_tracks_by_name(engine: Any, generate: Any, request: Request) -> Track:
    if request.track not in engine._model.spec.tracks:
        raise RecipeError(f"sampling: no track {request.track!r}.")
    return generate(request)


def answers_other_kinds(engine: Any, generate: Any, request: Request) -> Track:
    if isinstance(request.params, LatentRequest):
        return generate(request)
    return Track(
        name=request.track,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        inputs=request.inputs,
        metadata=request.metadata,
        sample_weights=torch.ones(request.num_rows),
        status=(Status.COMPLETED,) * request.num_rows,
        policy_version=(engine.version,) * request.num_rows,
    )


def known_kernel(sampling: Any) -> Fields:
    is_known = ":" in sampling.kernel or sampling.kernel in ("flow-sde", "dance-sde", "cps", "euler", "dpm2")
    return {} if is_known else {"kernel": "flow-sde"}


def ignores_guidance(_: Any, generate: Any, request: Request) -> Track:
    latent = request.latent
    if latent.sampling.guidance_scale == 1.0:
        return generate(request)
    bare = replace(latent, sampling=replace(latent.sampling, guidance_scale=1.0))
    return with_segment(generate(replace(request, params=bare)), sampler=latent.sampler)


def drops_weights(_: Any, load_weights: Any, update: WeightUpdate) -> WeightReceipt:
    return WeightReceipt(
        version=update.version, checksum=update.checksum, num_tensors=len(update.tensors), size_bytes=0
    )


def engine(name: str, claim: str, breaks: str, *, spec: Any = LATENT_ONLY, **changes: Any) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, spec=spec, changes=changes)


# fmt: off
MUTANTS = [
    engine("stays-in-evaluation", "sampling-does-not-modify-torch-or-the-model", "leaves the model in evaluation mode",
           generate=then(lambda engine, _: engine._model.trainable.eval())),
    engine("drops-out", "dropout-is-off-while-sampling", "samples in training mode", generate=drops_out),
    engine("knows-tracks-by-name", KINDS, "refuses stages that are not called as in the model's spec",
           generate=knows_tracks_by_name),
    engine("answers-other-kinds", KINDS, "answers requests of another kind with nothing", generate=answers_other_kinds),
    latents("takes-any-kernel", "a-kernel-that-is-not-in-its-spec-is-refused",
            "runs flow-sde for kernels that it does not know", sampling=known_kernel,
            changes={"_check": lambda _, check, request: isinstance(request.params, LatentRequest) or check(request)}),
    latents("shares-inputs-by-text", "inputs-of-one-text-are-not-shared", "keys inputs by their texts",
            request=with_first_media),
    latents("drops-turns", "a-sample-goes-on-from-its-own-turns", "gives the model texts and media alone",
            request=lambda _, request: {"inputs": replace(request.inputs, turns=None)}),
    engine("ignores-guidance", "guidance-that-it-does-not-state-is-refused", "echoes guidance that it did not use",
           spec=engine_plain.SPECS[0], generate=ignores_guidance),
    engine("keeps-the-first", "settings-that-round-rollouts-keep-their-bound",
           "finds the first prompt for every other in a cache of one",
           spec=replace(LATENT_ONLY, build=f"{__name__}:KeepsTheFirst")),
    engine("leaves-a-thread", CLOSING, "a thread outlives close", generate=leaves_thread(seconds=20)),
    engine("closes-once", CLOSING, "raises when it is closed a second time", close=closes_once),
    engine("copies-the-weights", "shared-weights-are-sampled-as-they-train", "samples from a copy made at the start",
           spec=replace(LATENT_ONLY, build=f"{__name__}:CopiesTheWeights")),
    engine("takes-weights-anyway", "an-engine-that-shares-its-weights-refuses-others",
           "answers a weight update and drops it", load_weights=drops_weights),
]
# fmt: on
