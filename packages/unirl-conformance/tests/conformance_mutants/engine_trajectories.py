"""Engines that are wrong in one way in what they say of the steps: latents, kernels, log-probs, guidance, conditions."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import torch
from unirl.core.request import LatentRequest, Request
from unirl.core.track import Conditions, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.numerics.track_replay import TrackReplay

from conformance_mutants.engine_changes import Changes, segment_with
from conformance_mutants.mutant import Mutant


class StoresEverything(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, trajectory="full")


class StoresTheWindow(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, trajectory="window")


class TakesEulerForDpm2(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        kernel = "euler" if latent.sampling.kernel == "dpm2" else latent.sampling.kernel
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel=kernel))


class SumsLogProbs(Changes):
    """Without guidance; over the elements."""

    def track(self, request: Request, track: Track) -> Track:
        segment = track.latent
        if segment.log_probs is None or segment.guidance_scale != 1.0:
            return track
        return segment_with(track, log_probs=segment.log_probs * segment.latents[0, 0].numel())


class ScoresWithoutGuidance(Changes):
    def track(self, request: Request, track: Track) -> Track:
        if track.latent.guidance_scale == 1.0 or not track.latent.sde_steps.numel():
            return track
        bare = segment_with(track, guidance_scale=1.0)
        with torch.no_grad():
            replayed = TrackReplay(self._model, stacked=True, policy_context=lambda _: nullcontext())(bare)
        return segment_with(track, log_probs=replayed.log_probs)


class IgnoresGuidanceModes(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, guidance_mode="batched"))


class IgnoresNegatives(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, negative_prompt=""))


class OrdersConditions(Changes):
    """As if groups stood together."""

    def track(self, request: Request, track: Track) -> Track:
        def sort(one: Conditions) -> Conditions:
            return dataclasses.replace(one, index=one.index.sort().values)

        return dataclasses.replace(track, conditions={name: sort(one) for name, one in track.conditions.items()})


BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: Mutant(claim=claim, name=name, broken=broken)
    for kind, claim, name, broken in (
        (
            StoresEverything,
            "a-window-holds-the-latents-around-sde-steps-and-the-end",
            "stores-everything",
            "stores the full trajectory where a window was asked for",
        ),
        (
            StoresTheWindow,
            "a-full-trajectory-holds-every-latent",
            "stores-the-window",
            "stores a window where the full trajectory was asked for",
        ),
        (
            TakesEulerForDpm2,
            "every-kernel-of-the-spec-steps-by-its-formula",
            "takes-euler-for-dpm2",
            "runs euler when dpm2 is asked for",
        ),
        (SumsLogProbs, "log-probs-are-those-of-the-replay", "sums-log-probs", "sums log-probs over the elements"),
        (
            ScoresWithoutGuidance,
            "log-probs-under-guidance-are-those-of-the-replay",
            "scores-without-guidance",
            "scores guided steps with the conditional velocity",
        ),
        (
            IgnoresGuidanceModes,
            "guidance-and-its-mode-are-honoured",
            "ignores-guidance-modes",
            "echoes norm-corrected and does not do it",
        ),
        (
            IgnoresNegatives,
            "negative-prompts-are-used-and-returned",
            "ignores-negatives",
            "always guides away from the empty prompt",
        ),
        (
            OrdersConditions,
            "conditions-are-those-that-it-generated-from",
            "orders-conditions",
            "returns conditions as if groups stood together",
        ),
    )
}
