"""Engines that are wrong in one way in what they say of the steps: latents, kernels, log-probs, guidance, conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.conformance.doubles.samplers import ComposedCfg
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import Conditions, Track
from unirl.numerics.train.track_replay import TrackReplay

from conformance_mutants.engine_changes import Changes, ChangesHonestly, everything, segment_with
from conformance_mutants.mutant import mutant, mutants_in


@mutant(
    claim="a-window-holds-the-latents-around-sde-steps-and-the-end",
    breaks="stores the full trajectory where a window was asked for",
)
class StoresEverything(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return latent if latent.keep.numel() else dataclasses.replace(latent, keep=everything(latent))


@mutant(claim="a-full-trajectory-holds-every-latent", breaks="stores a window where the full trajectory was asked for")
class StoresTheWindow(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, keep=latent.keep[:, :0])


@mutant(
    claim="every-kernel-of-the-spec-steps-by-its-formula",
    name="takes-euler-for-dpm2",
    breaks="runs euler when dpm2 is asked for",
)
class TakesEulerForDpm2(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        kernel = "euler" if latent.sampling.kernel == "dpm2" else latent.sampling.kernel
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel=kernel))


@mutant(claim="log-probs-are-those-of-the-replay", breaks="sums log-probs over the elements")
class SumsLogProbs(Changes):
    """Without guidance; over the elements."""

    def track(self, request: Request, track: Track) -> Track:
        segment = track.latent
        if segment.log_probs is None or segment.sampler.guidance_scale != 1.0:
            return track
        return segment_with(track, log_probs=segment.log_probs * segment.latents[0, 0].numel())


@mutant(claim="only-requested-steps-are-scored", breaks="scores every stochastic step, and says so")
class ScoresEveryStep(ChangesHonestly):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, train_steps=None)


@mutant(claim="only-requested-steps-are-scored", breaks="scores the first steps of those with noise, as many as asked")
class ScoresTheFirstSteps(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        if latent.train_steps is None:
            return latent
        return dataclasses.replace(latent, train_steps=latent.sde_steps[:, : latent.train_steps.shape[1]])

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, train_steps=request.latent.train_steps)


@mutant(
    claim="log-probs-under-guidance-are-those-of-the-replay", breaks="scores guided steps with the conditional velocity"
)
class ScoresWithoutGuidance(Changes):
    def track(self, request: Request, track: Track) -> Track:
        if track.latent.sampler.guidance_scale == 1.0 or not track.latent.sde_steps.numel():
            return track
        bare = segment_with(track, sampler=dataclasses.replace(track.latent.sampler, guidance_scale=1.0))
        with torch.no_grad():
            replayed = TrackReplay(self._model, stacked=True, policy_context=lambda _: nullcontext())(bare)
        return segment_with(track, log_probs=replayed.log_probs)


@mutant(claim="guidance-and-its-mode-are-honoured", breaks="echoes norm-corrected and does not do it")
class IgnoresGuidanceModes(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        if ":" in latent.sampling.guidance_mode:
            return latent
        return dataclasses.replace(
            latent, sampling=dataclasses.replace(latent.sampling, guidance_mode="batched", guidance_options={})
        )


@mutant(
    claim="kernel-and-its-settings-are-echoed",
    breaks="runs kernels with their default options, and says so",
    # Log-probs are then those of another formula.
    also=("log-probs-are-those-of-the-replay",),
)
class DropsKernelOptions(ChangesHonestly):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        options = {"constants": True} if latent.sampling.kernel == "cps" else latent.sampling.kernel_options
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel_options=options))


@mutant(
    claim="guidance-and-its-mode-are-honoured",
    breaks="computes batched guidance whatever was asked for, and says so",
)
class HasOneGuidanceMode(ChangesHonestly):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        if ":" in latent.sampling.guidance_mode:
            return latent
        return dataclasses.replace(
            latent, sampling=dataclasses.replace(latent.sampling, guidance_mode="batched", guidance_options={})
        )


@dataclass(frozen=True, kw_only=True)
class SwapsTwo(ComposedCfg):
    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        swapped = {**velocities, "negative": velocities["empty"], "empty": velocities["negative"]}
        return super().combine(swapped, sigma)


@dataclass(frozen=True, kw_only=True)
class EncodesTwo(ComposedCfg):
    def inputs(self, branch: str, inputs: Inputs, *, negative_prompt: str) -> Inputs:
        branch = "negative" if branch == "empty" else branch
        return super().inputs(branch, inputs, negative_prompt=negative_prompt)


class TakesAnotherGuidance(Changes):
    """Of a plugin's guidance this one."""

    other: type[ComposedCfg]

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        if ":" not in latent.sampling.guidance_mode:
            return latent
        name = f"{self.other.__module__}:{self.other.__name__}"
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, guidance_mode=name))


@mutant(
    claim="kernels-and-guidances-of-plugins-are-computed",
    breaks="hands two branches of a plugin's guidance over under each other's names",
)
class SwapsBranches(TakesAnotherGuidance):
    other = SwapsTwo


@mutant(
    claim="kernels-and-guidances-of-plugins-are-computed",
    breaks="encodes the negative prompt for every branch but the positive one",
)
class EncodesTwoBranches(TakesAnotherGuidance):
    other = EncodesTwo


@mutant(
    claim="negative-prompts-are-used-and-returned",
    breaks="always guides away from the empty prompt",
    also=("kernels-and-guidances-of-plugins-are-computed",),
)
class IgnoresNegatives(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, negative_prompt=""))


@mutant(
    claim="returned-conditions-are-those-used",
    breaks="returns conditions as if groups stood together",
    also=("inputs-of-one-text-are-not-shared",),
)
class OrdersConditions(Changes):
    """As if groups stood together."""

    def track(self, request: Request, track: Track) -> Track:
        def sort(one: Conditions) -> Conditions:
            return dataclasses.replace(one, index=one.index.sort().values)

        return dataclasses.replace(track, conditions={name: sort(one) for name, one in track.conditions.items()})


BROKEN = mutants_in(__name__)
