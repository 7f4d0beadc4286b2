"""The evidence lower bound of a finished sample, up to a constant: its negative error of flow matching."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .forward_process import LEAST_ERROR, Points, matching_error, velocity_target

__all__ = ["ElboWeighting", "elbo"]

ElboWeighting = Literal["uniform", "adaptive"]


def elbo(velocity: Tensor, points: Points, *, weighting: ElboWeighting = "uniform") -> Tensor:
    """-w mean (v - (x1 - x0))^2 at each point. Its mean over the points of a sample estimates the sample's ELBO per
    element, without the terms that no policy changes.

    velocity: [n, k, ...].  Returns [n, k] fp64, with gradient.
    `uniform`: w is 1.  `adaptive`: w is sigma / mean |v - (x1 - x0)|, which has no gradient, so that every noise level
    pulls about equally; -w e is then the negative `self_weighted_error` of the clean estimate.
    Source: arXiv 2602.04663, its weightings "simple" and "adaptive"; the latter is that of DiffusionNFT, arXiv
    2509.16117.
    """
    error = matching_error(velocity, points)
    if weighting == "uniform":
        return -error
    target, sigma = velocity_target(points.x0, points.x1), points.sigma.double()
    distance = (velocity.detach().double() - target.double()).abs().flatten(2).mean(dim=2)
    # Of the clean estimate, sigma (v - target), as in `self_weighted_error`.
    return -sigma.square() / (sigma * distance).clamp_min(LEAST_ERROR) * error
