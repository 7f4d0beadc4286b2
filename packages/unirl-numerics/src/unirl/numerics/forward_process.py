"""The forward process of rectified flow: noised latents, their velocity target, and errors of clean estimates.

A clean latent x0 and noise x1 are joined by a straight line. Source: rectified flow, arXiv 2209.03003, equation 1;
notation as in Stable Diffusion 3, arXiv 2403.03206.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from .noise import Device, noise, stream

if TYPE_CHECKING:
    from unirl.core.types.track import LatentSegment, Track

    from .forward_config import ForwardConfig

__all__ = [
    "PointLosses",
    "Points",
    "clean_estimate",
    "direct_align",
    "forward_noise",
    "forward_points",
    "forward_sigmas",
    "levels_at",
    "matching_error",
    "noised",
    "self_weighted_error",
    "squared_error",
    "velocity_target",
]

Levels = Literal["uniform", "logit-normal", "schedule"]

FORWARD = -1
"""In place of the number of the rollout, which counts from 0: the noise of generation is never drawn again."""
SIGMAS = -1
"""The step number of the draw of noise levels; noise has the number of its draw."""
LEAST_ERROR = 1e-5
"""Smallest mean absolute error that `self_weighted_error` divides by."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """k points of each of n samples, on the lines from their clean latents to noise."""

    x0: Tensor
    """[n, 1, ...] fp32 clean latents."""
    x1: Tensor
    """[n, k, ...] fp32 noise."""
    sigma: Tensor
    """[n, k] fp32 noise levels."""
    x: Tensor
    """[n, k, ...] fp32 points."""


def forward_points(segment: LatentSegment, config: ForwardConfig, *, seed: int, ids: Sequence[str]) -> Points:
    """The points that a loss over the forward process trains on, `config.num_points` of each sample.

    ids: of whatever draws its points alone: the samples, or their units, whose rows then share noise and noise levels.
    A pure function of (seed, id, clean latent), the same in every update of a rollout.
    """
    x0, draws = segment.final.float()[:, None], drawn(segment, config.num_points)
    first, last = config.point_range
    quantiles = forward_sigmas(seed=seed, ids=ids, draws=config.num_points, between=(first, last), device=x0.device)
    quantiles = quantiles[:, draws]
    sigma = levels_at(quantiles, kind=cast(Levels, config.point_levels), schedule=segment.sigmas.to(x0.device))
    x1 = forward_noise(seed=seed, ids=ids, draws=draws, shape=x0.shape[2:], device=x0.device)
    return Points(x0=x0, x1=x1, sigma=sigma, x=noised(x0, x1, sigma))


class PointLosses:
    """For an `unirl.core.roles.Algorithm` whose losses are sums over the points that it draws for a sample."""

    separates_steps = True
    num_points: int
    """Points of each sample."""

    def pieces(self, track: Track) -> list[Track]:
        """See `unirl.core.roles.Algorithm`. Log-probs are of the points."""
        segment = track.latent

        def piece(draw: int) -> Track:
            log_probs = None if segment.log_probs is None else segment.log_probs[:, draw : draw + 1]
            part = dataclasses.replace(segment, draws=(draw,), log_probs=log_probs)
            return dataclasses.replace(track, segment=part)

        return [piece(draw) for draw in range(self.num_points)]

    def point_weights(self, track: Track) -> Tensor:
        """[n, k]: the sample's weight at each of its points."""
        return track.sample_weights[:, None].expand(-1, len(drawn(track.latent, self.num_points)))


def drawn(segment: LatentSegment, num_points: int) -> list[int]:
    """Which of the points of each sample are trained on."""
    return list(range(num_points) if segment.draws is None else segment.draws)


def forward_noise(
    *, seed: int, ids: Sequence[str], draws: int | Sequence[int], shape: Sequence[int], device: Device = None
) -> Tensor:
    """Noise x1 of so many draws of each sample, or of these.  Returns [len(ids), draws, *shape] fp32.

    A pure function of (seed, sample id, draw), whatever other samples are drawn with it.
    """
    steps = range(draws) if isinstance(draws, int) else draws
    drawn = [noise(seed=seed, rollout=FORWARD, ids=ids, step=step, shape=shape, device=device) for step in steps]
    return torch.stack(drawn, dim=1)


def forward_sigmas(
    *,
    seed: int,
    ids: Sequence[str],
    draws: int,
    between: tuple[float, float] = (0.0, 1.0),
    device: Device = None,
) -> Tensor:
    """Noise levels of each draw of each sample, draw j uniform in the j-th of `draws` equal parts of `between`.

    Returns [len(ids), draws] fp32, a pure function of (seed, sample id, draws). Stratified: their mean over the draws
    estimates an expectation over uniform sigma with less variance than independent ones.
    """
    raw = np.stack([stream(seed=seed, rollout=FORWARD, label=label, step=SIGMAS).random_raw(draws) for label in ids])
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    first, last = between
    levels = first + (last - first) * (np.arange(draws) + uniform) / draws
    return torch.as_tensor(levels, dtype=torch.float32, device=device)


def levels_at(quantiles: Tensor, *, kind: Levels, schedule: Tensor) -> Tensor:
    """Noise levels at these quantiles in [0, 1] of their distribution, rising from clean to noise. fp32, same shape.

    `uniform`: over [0, 1].  `logit-normal`: the sigmoid of a standard normal, which prefers the middle (Stable
    Diffusion 3, arXiv 2403.03206, section 3.1).  `schedule`: the levels that the sampler visits, each equally often.
    schedule: [T+1] fp32, falling, ending in 0, which is not drawn.
    """
    if kind == "uniform":
        return quantiles
    if kind == "logit-normal":
        # sqrt(2) erfinv(2 q - 1) is the normal quantile.
        return (2**0.5 * torch.erfinv(2 * quantiles.double() - 1)).sigmoid().float()
    steps = len(schedule) - 1
    rising = (quantiles.double() * steps).long().clamp(max=steps - 1)
    return schedule[steps - 1 - rising]


def noised(x0: Tensor, x1: Tensor, sigma: Tensor) -> Tensor:
    """x_sigma = (1 - sigma) x0 + sigma x1.  x0, x1: [n, k, ...] (or broadcast to it).  sigma: [n, k]."""
    level = _level(sigma, like=x1)
    return (1 - level) * x0 + level * x1


def velocity_target(x0: Tensor, x1: Tensor) -> Tensor:
    """x1 - x0: the velocity of the line, the target of flow matching (arXiv 2210.02747)."""
    return x1 - x0


def clean_estimate(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x0 where the velocity points: x - sigma v.  x, velocity: [n, k, ...].  sigma: [n, k]."""
    return x - _level(sigma, like=x) * velocity


def matching_error(velocity: Tensor, points: Points) -> Tensor:
    """Squared error of flow matching at each point, averaged over elements: mean (v - (x1 - x0))^2.

    velocity: [n, k, ...].  Returns [n, k] fp64, with gradient.
    Source: flow matching, arXiv 2210.02747, equation 9, on the line of rectified flow.
    """
    return squared_error(velocity, velocity_target(points.x0, points.x1))


def squared_error(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean (v - target)^2 over the elements of each point. velocity, target: [n, k, ...].  Returns [n, k] fp64, with
    gradient: losses take small differences of two errors, which fp32 would round."""
    return (velocity.double() - target.double()).square().flatten(2).mean(dim=2)


def direct_align(x: Tensor, velocity: Tensor, x1: Tensor, *, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x0 where one step of the velocity and the known noise lead: (x + (sigma' - sigma) v - sigma' x1) / (1 - sigma').

    x, velocity, x1: [n, k, ...], x noised with x1.  sigma, sigma_next: [n, k], sigma_next below 1.  Exact where the
    velocity is the true one, at every noise level. The slope in v, (sigma' - sigma) / (1 - sigma'), is at most 1 in
    size for steps towards the data (sigma' < sigma). Steps towards noise, inversion, have the opposite sign.
    Source: SRPO, arXiv 2509.06942, Direct-Align, equations 5 and 9, for rectified flow.
    """
    start, end = _level(sigma, like=x), _level(sigma_next, like=x)
    return (x + (end - start) * velocity - end * x1) / (1 - end)


def self_weighted_error(estimate: Tensor, x0: Tensor, *, adaptive: bool = True) -> Tensor:
    """Mean squared error of each point, over its own mean absolute error.  Returns [n, k] fp32, with gradient.

    estimate: [n, k, ...].  x0: broadcast to it.  The divisor is computed in fp64, has no gradient and is at least 1e-5:
    every noise level then pulls about equally. adaptive: False leaves it out.
    Source: DiffusionNFT, arXiv 2509.16117, its adaptive weighting.
    """
    difference = estimate - x0
    error = difference.square().flatten(2).mean(dim=2)
    if not adaptive:
        return error
    size = difference.detach().abs().double().flatten(2).mean(dim=2).clamp_min(LEAST_ERROR)
    return (error / size).float()


def _level(sigma: Tensor, *, like: Tensor) -> Tensor:
    """[n, k] -> [n, k, 1, ...]."""
    return sigma.view(*sigma.shape, *(1,) * (like.ndim - sigma.ndim))
