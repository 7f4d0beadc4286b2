"""In-process denoising of a latent track, shared by every in-process engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from unirl.core.types.inputs import Inputs, distinct
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Conditions, LatentSegment, Status, Track
from unirl.numerics.diffusion.denoise import Walk, finish, storage_dtype
from unirl.numerics.diffusion.guidance import Velocity
from unirl.numerics.diffusion.sampler import guidance_of, kernel_of
from unirl.numerics.noise import INITIAL, noise, noise_digest
from unirl.numerics.pixels import levels

if TYPE_CHECKING:
    from unirl.core.roles import DiffusionModel

__all__ = ["as_media", "branch_inputs", "encoded", "latent_track", "latent_walk", "sample_latents"]


def sample_latents(
    velocity: Velocity,
    request: Request,
    *,
    latent_shape: Sequence[int],
    conditions: Mapping[str, Conditions],
    device: torch.device | str | None = None,
) -> LatentSegment:
    """Denoise every row of `request`, with the request's noise. Rows of a tree (`LatentRequest.step_noise_ids`) that
    are still equal at a step go through the model once.

    latent_shape: of one sample.  conditions: of each branch of the guidance, see `branch_inputs`.
    Rows are independent: any split of the request gives the same result, up to the rounding of a forward at another
    batch size.

    Runs under the caller's grad mode.  Raises ValueError when kernel, SDE steps and schedule do not fit together.
    """
    walk = latent_walk(request, latent_shape=latent_shape, device=device)
    # Of the tensor that is actually denoised.
    digests = noise_digest(walk.x)
    branches = walk.guidance.branches
    finish(walk, velocity, conditions={name: conditions[name].expanded() for name in branches if name in conditions})
    return walk.segment(initial_noise=digests)


def latent_walk(request: Request, *, latent_shape: Sequence[int], device: torch.device | str | None = None) -> Walk:
    """Every row of `request` at its x_T, with kernel, guidance, steps and noise of the request.

    For an engine with its own loop, which computes the velocities.

    latent_shape: of one sample.  Raises ValueError when kernel, SDE steps and schedule do not fit together.
    """
    expected = request.latent
    sampler, shape = expected.sampler, tuple(latent_shape)

    keys = expected.step_noise_ids

    def step_noise(step: int, rows: Tensor) -> Tensor:
        ids = [
            request.sample_ids[row] if keys is None else keys[row][step]
            for row in cast("list[int]", cast("Any", rows).tolist())
        ]
        return noise(seed=request.seed, rollout=request.rollout, ids=ids, step=step, shape=shape, device=device)

    initial = noise(
        seed=request.seed,
        rollout=request.rollout,
        ids=expected.noise_ids,
        step=INITIAL,
        shape=shape,
        device=device,
    )
    return Walk(
        initial,
        sigmas=expected.sigmas,
        kernel=kernel_of(sampler),
        guidance=guidance_of(sampler),
        sde_steps=expected.sde_steps,
        step_noise=step_noise,
        keep=expected.keep,
        storage_dtype=storage_dtype(expected.sampling),
        train_steps=expected.train_steps,
        step_noise_ids=keys,
        starts=[*zip(distinct(request.inputs)[1], expected.noise_ids, strict=True)],
    )


def branch_inputs(request: Request) -> dict[str, Inputs]:
    """Branch of the request's guidance -> what its conditions are encoded from, row for row."""
    guidance, negative_prompt = guidance_of(request.latent.sampler), request.latent.sampling.negative_prompt
    return {
        branch: guidance.inputs(branch, request.inputs, negative_prompt=negative_prompt) for branch in guidance.branches
    }


def encoded(model: DiffusionModel, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Conditions:
    """The model's conditions of these inputs, the distinct ones encoded together."""
    rows, index = distinct(inputs)
    values = model.encode(inputs.select(rows), sampling=sampling)
    return Conditions(values=values, index=torch.tensor(index, device=model.device))


def as_media(decoded: Tensor, request: Request) -> Tensor:
    """What a track has of decoded media: levels of pixels; sound as it is."""
    return decoded if request.medium == "audio" else levels(decoded)


def latent_track(
    request: Request,
    *,
    segment: LatentSegment,
    conditions: Mapping[str, Conditions],
    media: Tensor | None,
    policy_version: Sequence[int],
) -> Track:
    """The track of a whole request. The request supplies its name and the identity of its rows: ids, group, inputs,
    metadata. The settings used are only in the segment.

    media: [N, 3, H, W] images or [N, F, 3, H, W] videos in [0, 1], or their `levels`, or [N, C, S] sound, or None when
    they were not decoded. The track has levels of pixels: a quarter of the bytes, rounded once, for all that read it.
    Videos have the rate of `sampling.fps`.
    policy_version: [N], of the weights that generated each row.
    """
    kind = request.medium if request.medium == "audio" else "image" if media is None or media.ndim == 4 else "video"
    rate = request.latent.sampling.fps or None if kind == "video" else None
    return Track(
        name=request.track,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        parent_ids=request.inputs.ids,
        inputs=request.inputs,
        metadata=request.metadata,
        conditions=conditions,
        segment=segment,
        media=None if media is None else Media(kind=kind, values=as_media(media, request), rate=rate),
        sample_weights=torch.ones(request.num_rows),
        status=(Status.COMPLETED,) * request.num_rows,
        policy_version=tuple(policy_version),
    )
