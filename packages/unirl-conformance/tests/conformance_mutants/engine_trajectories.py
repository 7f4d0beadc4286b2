"""Engines that are wrong about the steps: latents, kernels, log-probs, guidance, conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.doubles.samplers import ComposedCfg
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.numerics.train.track_replay import TrackReplay

from conformance_mutants.changes import with_segment
from conformance_mutants.engine_changes import Fields, everything, latents

OF_PLUGINS, SCORED = "kernels-and-guidances-of-plugins-are-computed", "only-requested-steps-are-scored"
MODES, REPLAYED = "guidance-and-its-mode-are-honoured", "log-probs-are-those-of-the-replay"


def summed(_: Any, request: Request, track: Track) -> Fields:
    """Summed over the elements; only without guidance."""
    segment = track.latent
    if segment.log_probs is None or segment.sampler.guidance_scale != 1.0:
        return {}
    return {"log_probs": segment.log_probs * segment.latents[0, 0].numel()}


def first_steps(_: Any, request: Request) -> Fields:
    steps = request.latent.train_steps
    return {} if steps is None else {"train_steps": request.latent.sde_steps[:, : steps.shape[1]]}


def scored_without_guidance(engine: Any, request: Request, track: Track) -> Fields:
    sampler = track.latent.sampler
    if sampler.guidance_scale == 1.0 or not track.latent.sde_steps.numel():
        return {}
    replay = TrackReplay(engine._model, stacked=True, policy_context=lambda _: nullcontext())
    with torch.no_grad():
        return {"log_probs": replay(with_segment(track, sampler=replace(sampler, guidance_scale=1.0))).log_probs}


def batched(sampling: Any) -> Fields:
    """Plugins' own modes are computed."""
    return {} if ":" in sampling.guidance_mode else {"guidance_mode": "batched", "guidance_options": {}}


def guided_by(guidance: type[ComposedCfg]) -> Callable[[Any], Fields]:
    """This in place of a plugin's guidance."""
    name = f"{guidance.__module__}:{guidance.__name__}"
    return lambda sampling: {"guidance_mode": name} if ":" in sampling.guidance_mode else {}


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


# fmt: off
MUTANTS = [
    latents("stores-everything", "a-window-holds-the-latents-around-sde-steps-and-the-end",
            "stores the full trajectory where a window was asked for",
            params=lambda _, request: {} if request.latent.keep.numel() else {"keep": everything(request)}),
    latents("stores-the-window", "a-full-trajectory-holds-every-latent",
            "stores a window where the full trajectory was asked for",
            params=lambda _, request: {"keep": request.latent.keep[:, :0]}),
    latents("takes-euler-for-dpm2", "every-kernel-of-the-spec-steps-by-its-formula",
            "runs euler when dpm2 is asked for",
            sampling=lambda sampling: {"kernel": "euler"} if sampling.kernel == "dpm2" else {}),
    latents("sums-log-probs", REPLAYED, "sums log-probs over the elements", segment=summed),
    latents("scores-every-step", SCORED, "scores every stochastic step, and says so", is_honest=True,
            params=lambda _, request: {"train_steps": None}),
    latents("scores-the-first-steps", SCORED, "scores the first steps of those with noise, as many as asked",
            params=first_steps, segment=lambda _, request, track: {"train_steps": request.latent.train_steps}),
    latents("scores-without-guidance", "log-probs-under-guidance-are-those-of-the-replay",
            "scores guided steps with the conditional velocity", segment=scored_without_guidance),
    latents("ignores-guidance-modes", MODES, "echoes norm-corrected and does not do it", sampling=batched),
    latents("has-one-guidance-mode", MODES, "computes batched guidance whatever was asked for, and says so",
            is_honest=True, sampling=batched),
    # Log-probs are then those of another formula.
    latents("drops-kernel-options", "kernel-and-its-settings-are-echoed",
            "runs kernels with their default options, and says so", also=(REPLAYED,), is_honest=True,
            sampling=lambda sampling: {"kernel_options": {"constants": True}} if sampling.kernel == "cps" else {}),
    latents("swaps-branches", OF_PLUGINS,
            "hands two branches of a plugin's guidance over under each other's names", sampling=guided_by(SwapsTwo)),
    latents("encodes-two-branches", OF_PLUGINS,
            "encodes the negative prompt for every branch but the positive one", sampling=guided_by(EncodesTwo)),
    latents("ignores-negatives", "negative-prompts-are-used-and-returned", "always guides away from the empty prompt",
            also=(OF_PLUGINS,), sampling=lambda _: {"negative_prompt": ""}),
    latents("orders-conditions", "returned-conditions-are-those-used", "returns conditions as if groups stood together",
            also=("inputs-of-one-text-are-not-shared", "a-sample-goes-on-from-its-own-turns"),
            track=lambda _, request, track: {"conditions": {
                name: replace(one, index=one.index.sort().values) for name, one in track.conditions.items()}}),
]
# fmt: on
