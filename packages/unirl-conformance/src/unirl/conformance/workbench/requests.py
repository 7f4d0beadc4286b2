"""Requests for trials: prompts in groups, with the noise recipe, sigmas and SDE steps that a run would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel
from unirl.numerics.latent_request import plan_latents

__all__ = ["PROMPTS", "make_request"]

PROMPTS = ("a red ring on the left", "two blue squares", "a dog")
"""Of different lengths."""


def make_request(
    model: DiffusionModel,
    sampling: Mapping[str, LatentSamplingConfig],
    *,
    prompts: Sequence[str] = PROMPTS[:2],
    samples_per_prompt: int = 3,
    seed: int = 11,
    rollout: int = 5,
    policy_version: int = 0,
    sigmas: Mapping[str, Tensor] | None = None,
    trajectory: str = "window",
) -> Request:
    """A request for every track in `sampling`. Rows of a group stand together; groups are as many as prompts.

    sigmas: track -> another schedule than the model's.
    """
    import dataclasses

    groups = [number for number in range(len(prompts)) for _ in range(samples_per_prompt)]
    group_ids = tuple(f"r{rollout}/p{group}" for group in groups)
    sample_ids = tuple(f"{group}/{row % samples_per_prompt}" for row, group in enumerate(group_ids))
    tracks = {
        name: plan_latents(
            settings,
            sigmas=model.schedule(settings) if sigmas is None else sigmas[name],
            latent_shape=model.latent_shape(settings),
            seed=seed,
            rollout=rollout,
            sample_ids=sample_ids,
            group_ids=group_ids,
        )
        for name, settings in sampling.items()
    }
    return Request(
        sample_ids=sample_ids,
        group_ids=group_ids,
        prompt_ids=tuple(f"p{group}" for group in groups),
        prompts=tuple(prompts[group] for group in groups),
        metadata=tuple({"number": group} for group in groups),
        media=tuple(() for _ in groups),
        tracks={name: dataclasses.replace(track, trajectory=trajectory) for name, track in tracks.items()},
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )
