"""Engines that behave badly in one way in the process of a run."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import Status, Track
from unirl.engines.trainside.engine import TrainsideEngine

from conformance_mutants.engine_changes import Changes, segment_with
from conformance_mutants.engine_plain import PlainEngine
from conformance_mutants.mutant import mutant, mutants_in


@mutant(claim="sampling-does-not-modify-torch-or-the-model", breaks="leaves the model in evaluation mode")
class StaysInEvaluation(TrainsideEngine):
    def generate(self, request: Request) -> Track:
        track = super().generate(request)
        self._model.trainable.eval()
        return track


@mutant(claim="dropout-is-off-while-sampling", breaks="samples in training mode")
class DropsOut(TrainsideEngine):
    def generate(self, request: Request) -> Track:
        self._check(request)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return self._latents(request)


@mutant(
    claim="any-stage-of-its-kind-is-generated-and-another-kind-refused",
    breaks="refuses stages that are not called as in the model's spec",
)
class KnowsTracksByName(Changes):
    def generate(self, request: Request) -> Track:
        if request.track not in self._model.spec.tracks:
            raise RecipeError(f"sampling: no track {request.track!r}.")
        return super().generate(request)


@mutant(
    claim="any-stage-of-its-kind-is-generated-and-another-kind-refused",
    name="answers-other-kinds",
    breaks="answers requests of another kind with nothing",
)
class AnswersOtherKinds(Changes):
    def generate(self, request: Request) -> Track:
        if isinstance(request.params, LatentRequest):
            return super().generate(request)
        return Track(
            name=request.track,
            sample_ids=request.sample_ids,
            group_ids=request.group_ids,
            inputs=request.inputs,
            metadata=request.metadata,
            sample_weights=torch.ones(request.num_rows),
            status=(Status.COMPLETED,) * request.num_rows,
            policy_version=(self.version,) * request.num_rows,
        )


@mutant(claim="a-kernel-that-is-not-in-its-spec-is-refused", breaks="runs flow-sde for kernels that it does not know")
class TakesAnyKernel(Changes):
    def check_request(self, request: Request) -> None:
        """Whatever it is."""

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        kernel = latent.sampling.kernel
        if ":" in kernel or kernel in ("flow-sde", "dance-sde", "cps", "euler", "dpm2"):
            return latent
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel="flow-sde"))


@mutant(claim="inputs-of-one-text-are-not-shared", breaks="keys inputs by their texts")
class SharesInputsByText(Changes):
    """Encodes the text with the media that it had first."""

    def request(self, request: Request) -> Request:
        first: dict[str, Any] = {}
        pairs = zip(request.inputs.texts, request.inputs.media, strict=True)
        media = tuple(first.setdefault(text, media) for text, media in pairs)
        return dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, media=media))


@mutant(claim="guidance-that-it-does-not-state-is-refused", breaks="echoes guidance that it did not use")
class IgnoresGuidance(PlainEngine):
    def generate(self, request: Request) -> Track:
        latent = request.latent
        if latent.sampling.guidance_scale == 1.0:
            return super().generate(request)
        bare = dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, guidance_scale=1.0))
        track = super().generate(dataclasses.replace(request, params=bare))
        return segment_with(track, sampler=latent.sampler)


@mutant(claim="closing-leaves-nothing-running-and-may-be-done-twice", breaks="a thread outlives close")
class LeavesAThread(TrainsideEngine):
    def generate(self, request: Request) -> Track:
        # It ends by itself, but long after the claim has looked.
        threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
        return super().generate(request)


@mutant(claim="closing-leaves-nothing-running-and-may-be-done-twice", breaks="raises when it is closed a second time")
class ClosesOnce(TrainsideEngine):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed twice")
        self.is_closed = True


@mutant(claim="shared-weights-are-sampled-as-they-train", breaks="samples from a copy made at the start")
class CopiesTheWeights(TrainsideEngine):
    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=copy.deepcopy(model))
        self._original = model.trainable

    def generate(self, request: Request) -> Track:
        self._model.trainable.train(self._original.training)
        return super().generate(request)


@mutant(claim="an-engine-that-shares-its-weights-refuses-others", breaks="answers a weight update and drops it")
class TakesWeightsAnyway(TrainsideEngine):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        return WeightReceipt(
            version=update.version, checksum=update.checksum, num_tensors=len(update.tensors), size_bytes=0
        )


BROKEN = mutants_in(__name__)
