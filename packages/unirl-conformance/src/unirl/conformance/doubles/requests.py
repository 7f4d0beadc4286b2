"""Requests of claims: prompts in groups, with the noise recipe, SDE steps or seeds that a run would send."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from unirl.core.roles import Model
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.request import LatentRequest, Request, TextRequest
from unirl.core.types.sampling import LatentSamplingConfig, SamplingConfig, TextSamplingConfig
from unirl.core.types.serial import to_bytes
from unirl.loop.requests import build_request
from unirl.numerics.diffusion.request import plan_latents

__all__ = ["PROMPTS", "make_request", "numbered", "params_of_another_kind", "request_key"]

PROMPTS = ("a red ring on the left", "two blue squares", "a dog")
"""They have different lengths."""


def numbered(
    prompts: Sequence[str], *, media: Callable[[int], tuple[MediaRef, ...]] = lambda number: ()
) -> list[Prompt]:
    """Prompts as from a file: `p0`, `p1`, ... with their number as metadata. media: number -> its media."""
    return [
        Prompt(prompt_id=f"p{n}", text=text, metadata={"number": n}, media=media(n)) for n, text in enumerate(prompts)
    ]


def make_request(
    model: Model,
    sampling: SamplingConfig,
    *,
    track: str,
    prompts: Sequence[str] = PROMPTS[:2],
    media: Callable[[int], tuple[MediaRef, ...]] = lambda number: (),
    samples_per_prompt: int = 3,
    seed: int = 11,
    rollout: int = 5,
    policy_version: int = 0,
    keeps_all: bool = False,
) -> Request:
    """A request for this track, as a run makes it. media: as of `numbered`.  keeps_all: the latents of all positions
    are returned."""
    return build_request(
        numbered(prompts, media=media),
        track=track,
        sampling=sampling,
        samples_per_prompt=samples_per_prompt,
        model=model,
        trajectory="full" if keeps_all else "window",
        seed=seed,
        rollout=rollout,
        policy_version=policy_version,
    )


def request_key(request: Request) -> str:
    """The same for requests with the same content."""
    return hashlib.blake2b(to_bytes(request), digest_size=16).hexdigest()


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
