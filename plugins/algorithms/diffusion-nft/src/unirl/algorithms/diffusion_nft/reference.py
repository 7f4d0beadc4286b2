"""Reference implementation of the DiffusionNFT loss, point by point from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from unirl.algorithms.diffusion_nft.config import DiffusionNftConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss"]


def loss(config: DiffusionNftConfig, inputs: PointLossInputs) -> float:
    """Mean over the points of all samples of both policies' errors, plus `kl_coef` times the distance to the reference
    (arXiv 2509.16117, equation 6)."""
    total, weights = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        for point in range(config.num_points) if weight else ():
            total += float(weight) * _of_point(config, inputs, row, point)
            weights += float(weight)
    return total / weights if weights else 0.0


def _of_point(config: DiffusionNftConfig, inputs: PointLossInputs, row: int, point: int) -> float:
    clip, beta = config.advantage_clip, config.beta
    optimality = min(max(float(inputs.advantages[row]), -clip), clip) / (2 * clip) + 0.5
    live = inputs.velocities["live"][row, point]
    positive, negative = (_error(config, inputs, row, point, share) for share in (beta, -beta))
    value = config.scale / beta * (optimality * positive + (1 - optimality) * negative)
    if config.kl_coef:
        value += config.kl_coef * float(np.mean((live - inputs.velocities["reference"][row, point]) ** 2))
    return value


def _error(config: DiffusionNftConfig, inputs: PointLossInputs, row: int, point: int, share: float) -> float:
    """Of the clean estimate by (1 - share) v_old + share v, over its own mean absolute error, which has no gradient."""
    x, sigma, clean = inputs.x[row, point], inputs.sigma[row, point], inputs.clean[row]

    def difference(of: PointLossInputs) -> NDArray[np.float64]:
        old, live = of.velocities["lagged"][row, point], of.velocities["live"][row, point]
        return x - sigma * ((1 - share) * old + share * live) - clean

    error = float(np.mean(difference(inputs) ** 2))
    size = max(float(np.mean(np.abs(difference(inputs.detached)))), 1e-5)
    return error / size if config.adaptive_weight else error
