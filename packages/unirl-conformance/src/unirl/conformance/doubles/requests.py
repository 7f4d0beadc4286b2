"""Requests for trials: prompts in groups, with the noise recipe, sigmas, SDE steps or seeds that a run would send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from unirl.core.roles import DiffusionModel, TextModel
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import LatentRequest, Request, TextRequest
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.loop.requests import build_request
from unirl.numerics.diffusion.request import plan_latents

__all__ = ["PROMPTS", "make_request", "make_text_request", "numbered", "params_of_another_kind"]

PROMPTS = ("a red ring on the left", "two blue squares", "a dog")
"""Of different lengths."""


def numbered(
    prompts: Sequence[str], *, media: Callable[[int], tuple[MediaRef, ...]] = lambda number: ()
) -> list[Prompt]:
    """As a prompt file holds them: `p0`, `p1`, ... with their number as metadata. media: of each number."""
    return [
        Prompt(prompt_id=f"p{n}", text=text, metadata={"number": n}, media=media(n)) for n, text in enumerate(prompts)
    ]


def make_request(
    model: DiffusionModel,
    sampling: LatentSamplingConfig,
    *,
    track: str,
    prompts: Sequence[str] = PROMPTS[:2],
    media: Callable[[int], tuple[MediaRef, ...]] = lambda number: (),
    samples_per_prompt: int = 3,
    seed: int = 11,
    rollout: int = 5,
    policy_version: int = 0,
    sigmas: Tensor | None = None,
    keeps_all: bool = False,
) -> Request:
    """A request for this track. Rows of a group stand together; groups are as many as prompts.

    media: as of `numbered`.  sigmas: another schedule than the model's.  keeps_all: the latents at all positions come
    back.
    """
    groups = [number for number in range(len(prompts)) for _ in range(samples_per_prompt)]
    group_ids = tuple(f"r{rollout}/p{group}" for group in groups)
    sample_ids = tuple(f"{group}/{row % samples_per_prompt}" for row, group in enumerate(group_ids))
    schedule = model.schedule(sampling) if sigmas is None else sigmas
    params = plan_latents(
        dataclasses.replace(sampling, fps=sampling.fps or model.spec.fps),
        sigmas=schedule,
        latent_shape=model.latent_shape(sampling),
        seed=seed,
        rollout=rollout,
        sample_ids=sample_ids,
        group_ids=group_ids,
        trajectory="full" if keeps_all else "window",
    )
    return Request(
        track=track,
        sample_ids=sample_ids,
        group_ids=group_ids,
        inputs=Inputs.of_prompts([numbered(prompts, media=media)[group] for group in groups]),
        metadata=tuple({"number": group} for group in groups),
        params=params,
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def make_text_request(
    model: TextModel,
    sampling: TextSamplingConfig,
    *,
    track: str,
    prompts: Sequence[str] = PROMPTS[:2],
    media: Callable[[int], tuple[MediaRef, ...]] = lambda number: (),
    samples_per_prompt: int = 3,
    seed: int = 11,
    rollout: int = 5,
    policy_version: int = 0,
) -> Request:
    """The same for a text track, as a run makes it. media: as of `numbered`."""
    return build_request(
        numbered(prompts, media=media),
        track=track,
        sampling=sampling,
        samples_per_prompt=samples_per_prompt,
        model=model,
        trajectory="none",
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def params_of_another_kind(request: Request) -> LatentRequest | TextRequest:
    """Parameters of a text track in place of those of a latent one, or the other way round."""
    if isinstance(request.params, LatentRequest):
        return TextRequest(
            sampling=TextSamplingConfig(max_new_tokens=2),
            prompt_tokens=(torch.tensor([1]),) * request.num_rows,
            stop_tokens=(),
            seeds=(0,) * request.num_rows,
        )
    return plan_latents(
        LatentSamplingConfig(),
        sigmas=torch.tensor([1.0, 0.0]),
        latent_shape=(1,),
        seed=0,
        rollout=0,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
    )
