"""The forward process of rectified flow: noised latents, their velocity target, and errors of clean estimates.

A clean latent x0 and noise x1 are joined by a straight line. Source: rectified flow, arXiv 2209.03003, equation 1;
notation as in Stable Diffusion 3, arXiv 2403.03206.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .noise import Device, noise, stream

__all__ = [
    "clean_estimate",
    "direct_align",
    "forward_noise",
    "forward_sigmas",
    "noised",
    "self_weighted_error",
    "velocity_target",
]

FORWARD = -1
"""In place of the number of the rollout, which counts from 0: the noise of generation is never drawn again."""
SIGMAS = -1
"""The step number of the draw of noise levels; noise has the number of its draw."""
LEAST_ERROR = 1e-5
"""Smallest mean absolute error that `self_weighted_error` divides by."""


def forward_noise(*, seed: int, ids: Sequence[str], draws: int, shape: Sequence[int], device: Device = None) -> Tensor:
    """Noise x1 of each draw of each sample.  Returns [len(ids), draws, *shape] fp32.

    A pure function of (seed, sample id, draw), whatever other samples are drawn with it.
    """
    drawn = [noise(seed=seed, rollout=FORWARD, ids=ids, step=draw, shape=shape, device=device) for draw in range(draws)]
    return torch.stack(drawn, dim=1)


def forward_sigmas(*, seed: int, ids: Sequence[str], draws: int, device: Device = None) -> Tensor:
    """Noise levels in [0, 1) of each draw of each sample, draw j uniform in [j, j + 1) / draws.

    Returns [len(ids), draws] fp32, a pure function of (seed, sample id, draws). Stratified: their mean over the draws
    estimates an expectation over uniform sigma with less variance than independent ones.
    """
    raw = np.stack([stream(seed=seed, rollout=FORWARD, label=label, step=SIGMAS).random_raw(draws) for label in ids])
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.as_tensor((np.arange(draws) + uniform) / draws, dtype=torch.float32, device=device)


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


def direct_align(x: Tensor, velocity: Tensor, x1: Tensor, *, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x0 where one step of the velocity and the known noise lead: (x + (sigma' - sigma) v - sigma' x1) / (1 - sigma').

    x, velocity, x1: [n, k, ...], x noised with x1.  sigma, sigma_next: [n, k], sigma_next below 1.  Exact where the
    velocity is the true one, at every noise level. Its slope in v, (sigma' - sigma) / (1 - sigma'), is at most 1 in
    size.
    Source: SRPO, arXiv 2509.06942, Direct-Align, for rectified flow.
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
