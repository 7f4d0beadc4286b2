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
    live, old = inputs.velocities["live"][row, point], inputs.velocities["lagged"][row, point]
    x, sigma, clean = inputs.x[row, point], inputs.sigma[row, point], inputs.clean[row]
    positive = _error(config, x - sigma * ((1 - beta) * old + beta * live), clean)
    negative = _error(config, x - sigma * ((1 + beta) * old - beta * live), clean)
    value = config.scale / beta * (optimality * positive + (1 - optimality) * negative)
    if config.kl_coef:
        value += config.kl_coef * float(np.mean((live - inputs.velocities["reference"][row, point]) ** 2))
    return value


def _error(config: DiffusionNftConfig, estimate: NDArray[np.float64], clean: NDArray[np.float64]) -> float:
    error = float(np.mean((estimate - clean) ** 2))
    return error / max(float(np.mean(np.abs(estimate - clean))), 1e-5) if config.adaptive_weight else error
