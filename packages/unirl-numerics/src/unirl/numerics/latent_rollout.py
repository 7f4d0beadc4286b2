"""A latent track of a request, denoised in this process and made into a track: what every in-process engine shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from unirl.core.request import Request
from unirl.core.track import Conditions, KernelChoice, LatentSegment, Status, Track
from unirl.numerics.denoise import Trajectory, Walk, finished
from unirl.numerics.guidance import Guidance, Velocity
from unirl.numerics.kernels import make_kernel
from unirl.numerics.noise import INITIAL, noise, noise_digest

__all__ = ["LatentRollout", "guidance_of", "latent_track", "latent_walk", "sample_latents"]


@dataclass(frozen=True, kw_only=True)
class LatentRollout:
    """The trajectories of some rows of a request, with what they started from."""

    trajectory: Trajectory
    initial_noise: tuple[str, ...]
    """Digest of each row's x_T, taken from the very tensor that was denoised."""

    @classmethod
    def concat(cls, parts: Sequence[LatentRollout]) -> LatentRollout:
        """The rows of all parts, as one call over all rows would give them.

        Parts that store fewer positions than others are padded at their end, with position -1 and latent 0.
        """
        assert parts
        found = [part.trajectory for part in parts]
        num_slots = max(part.latents.shape[1] for part in found)
        return cls(
            trajectory=Trajectory(
                latents=torch.cat([_padded(part.latents, num_slots, value=0) for part in found]),
                positions=torch.cat([_padded(part.positions, num_slots, value=-1) for part in found]),
                sigmas=found[0].sigmas,
                sde_steps=torch.cat([part.sde_steps for part in found]),
                log_probs=_cat_or_none([part.log_probs for part in found]),
                means=_cat_or_none([part.means for part in found]),
                final=torch.cat([part.final for part in found]),
            ),
            initial_noise=tuple(digest for part in parts for digest in part.initial_noise),
        )


def sample_latents(
    velocity: Velocity,
    request: Request,
    track: str,
    *,
    latent_shape: Sequence[int],
    conditions: Mapping[str, Conditions],
    device: torch.device | str | None = None,
) -> LatentRollout:
    """Denoise every row of `request` on `track`, with the noise that the request's recipe gives.

    latent_shape: of one sample.  conditions: `positive`, and `negative` where the guidance scale is not 1.
    Rows do not depend on each other: any split of the request gives the same, but for the rounding of a forward
    at another batch size.

    Runs under the caller's grad mode.  Raises ValueError when kernel, SDE steps and schedule do not fit together.
    """
    sampling = request.latent(track).sampling
    walk = latent_walk(request, track, latent_shape=latent_shape, device=device)
    digests = noise_digest(walk.x)
    guidance = guidance_of(scale=sampling.guidance_scale, mode=sampling.guidance_mode, latent_rank=walk.x.ndim)
    negative = conditions.get("negative") if guidance.is_on else None
    trajectory = finished(
        walk,
        velocity,
        conditions=conditions["positive"].expanded(),
        negatives=None if negative is None else negative.expanded(),
        guidance=guidance,
    )
    return LatentRollout(trajectory=trajectory, initial_noise=digests)


def latent_walk(
    request: Request, track: str, *, latent_shape: Sequence[int], device: torch.device | str | None = None
) -> Walk:
    """Every row of `request` on `track` at its x_T, with kernel, steps and noise of the request, for an engine whose
    own loop gives the velocities.

    latent_shape: of one sample.  Raises ValueError when kernel, SDE steps and schedule do not fit together.
    """
    wanted = request.latent(track)
    sampling, shape = wanted.sampling, tuple(latent_shape)

    def step_noise(step: int, rows: Tensor) -> Tensor:
        ids = [request.sample_ids[int(row)] for row in rows]
        return noise(seed=request.seed, rollout=request.rollout, ids=ids, step=step, shape=shape, device=device)

    initial = noise(
        seed=request.seed,
        rollout=request.rollout,
        ids=wanted.noise_ids,
        step=INITIAL,
        shape=shape,
        device=device,
    )
    return Walk(
        initial,
        sigmas=wanted.sigmas,
        kernel=make_kernel(sampling.kernel, eta=sampling.eta, **sampling.kernel_options),
        sde_steps=wanted.sde_steps,
        step_noise=step_noise,
        store=wanted.trajectory,
    )


def guidance_of(*, scale: float, mode: str, latent_rank: int) -> Guidance:
    """The guidance of a request or segment. Rollout and replay both take it from here.

    latent_rank: dims of a batch of latents.  "norm-corrected" takes norms over the channels: the last dim of packed
    latents [B, tokens, C], dim 1 of [B, C, ...].
    """
    norm_dims = (-1,) if latent_rank == 3 else (1,)
    checked = cast(Literal["batched", "two-pass", "norm-corrected"], mode)
    return Guidance(scale=scale, mode=checked, norm_dims=norm_dims)


def latent_track(
    request: Request,
    track: str,
    *,
    sampled: LatentRollout,
    conditions: Mapping[str, Conditions],
    media: Tensor | None,
    version: int,
) -> Track:
    """The track of a whole request: its lineage, its segment, and the echo of everything that was used.

    media: [N, 3, H, W] images or [N, F, 3, H, W] videos in [0, 1], or None when they were not decoded.
    version: of the policy that the samples were made with.
    """
    sampling, trajectory = request.latent(track).sampling, sampled.trajectory
    # The request's tensors live on the CPU, and an echo is compared with them bit for bit.
    home = request.latent(track).sigmas.device
    is_video = media is not None and media.ndim == 5
    return Track(
        name=track,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        parent_ids=request.prompt_ids,
        prompts=request.prompts,
        metadata=request.metadata,
        conditions=conditions,
        segment=LatentSegment(
            latents=trajectory.latents,
            positions=trajectory.positions,
            sde_steps=trajectory.sde_steps,
            log_probs=trajectory.log_probs,
            means=trajectory.means,
            sigmas=trajectory.sigmas.to(home),
            kernel=KernelChoice(
                name=sampling.kernel,
                eta=sampling.eta,
                options=tuple(sorted(sampling.kernel_options.items())),
            ),
            guidance_scale=sampling.guidance_scale,
            guidance_mode=sampling.guidance_mode,
            initial_noise=sampled.initial_noise,
        ),
        images=None if is_video else media,
        videos=tuple(media.unbind()) if media is not None and is_video else None,
        weights=torch.ones(request.num_rows),
        status=(Status.COMPLETED,) * request.num_rows,
        policy_version=(version,) * request.num_rows,
    )


def _padded(values: Tensor, num_slots: int, *, value: int) -> Tensor:
    """values: [N, K, ...].  Returns [N, num_slots, ...]."""
    missing = num_slots - values.shape[1]
    if not missing:
        return values
    tail = values.new_full((values.shape[0], missing, *values.shape[2:]), value)
    return torch.cat([values, tail], dim=1)


def _cat_or_none(values: Sequence[Tensor | None]) -> Tensor | None:
    found = [value for value in values if value is not None]
    assert len(found) in (0, len(values))
    return torch.cat(found) if found else None
