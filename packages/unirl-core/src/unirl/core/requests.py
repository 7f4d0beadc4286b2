"""Turning prompts into requests: groups, ids, noise keys, SDE steps. Pure functions of the step number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .config import LatentSamplingConfig, SdeStepsConfig
from .data import Prompt
from .errors import PlanRejected, RecipeError
from .request import LatentRequest, Request

if TYPE_CHECKING:
    from .plan import Plan
    from .roles import Algorithm, DiffusionModel

__all__ = ["build_request", "evaluation_sampling"]


def build_request(
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: Mapping[str, LatentSamplingConfig],
    model: DiffusionModel,
    algorithm: Algorithm,
    seed: int,
    rollout: int,
    policy_version: int,
) -> Request:
    """A request for `samples_per_prompt` samples of each prompt, the samples of a prompt forming a group.

    Ids are `r<rollout>/<prompt id>` for groups and `.../<number>` for samples, so they never repeat in a run.
    Raises RecipeError for sampling settings that cannot be.
    """
    expanded = [(prompt, number) for prompt in prompts for number in range(samples_per_prompt)]
    group_ids = tuple(f"r{rollout}/{prompt.prompt_id}" for prompt, _ in expanded)
    sample_ids = tuple(f"{group}/{number}" for group, (_, number) in zip(group_ids, expanded, strict=True))

    def planned(name: str, settings: LatentSamplingConfig) -> LatentRequest:
        try:
            return algorithm.latent_request(
                settings,
                sigmas=model.schedule(settings),
                latent_shape=model.latent_shape(settings),
                seed=seed,
                rollout=rollout,
                sample_ids=sample_ids,
                group_ids=group_ids,
            )
        except ValueError as error:
            raise RecipeError(f"sampling of track {name!r}: {error}") from error

    return Request(
        sample_ids=sample_ids,
        group_ids=group_ids,
        prompt_ids=tuple(prompt.prompt_id for prompt, _ in expanded),
        prompts=tuple(prompt.text for prompt, _ in expanded),
        metadata=tuple(prompt.metadata for prompt, _ in expanded),
        media=tuple(prompt.media for prompt, _ in expanded),
        tracks={name: planned(name, settings) for name, settings in sampling.items()},
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def evaluation_sampling(plan: Plan) -> dict[str, LatentSamplingConfig]:
    """The sampling of evaluation: the training one with `eval.sampling` laid over it, and no SDE steps to train on.

    Raises PlanRejected for a key that sampling does not have.
    """
    allowed = {item.name for item in dataclasses.fields(LatentSamplingConfig)}
    unknown = sorted(set(plan.eval.sampling) - allowed)
    if unknown:
        raise PlanRejected(
            f"eval.sampling.{unknown[0]}: sampling has no such key; it has {', '.join(sorted(allowed))}."
        )
    changed: dict[str, Any] = {"sde": SdeStepsConfig(mode="none")}
    if "kernel" in plan.eval.sampling:
        # Options belong to the kernel that they were written for.
        changed["kernel_options"] = {}
    return {
        name: dataclasses.replace(settings, **{**changed, **plan.eval.sampling})
        for name, settings in plan.sampling.items()
    }
