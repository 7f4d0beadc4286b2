"""Reference implementation of the loss of centred reward distillation, group by group, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from unirl.algorithms.crd.config import CrdConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss", "of_group"]


def loss(config: CrdConfig, inputs: PointLossInputs) -> float:
    """Mean over the points of all samples that are compared (arXiv 2603.14128), plus `kl_coef` times the distance to
    the reference."""
    total, weights = 0.0, 0.0
    for group in inputs.units:
        rows = [row for row in group if inputs.weights[row]]
        advantages = [float(inputs.advantages[row]) for row in rows]
        if len(set(advantages)) < 2:
            continue
        for point in range(config.num_points):
            gains = [_elbo(config, inputs, "live", row, point) - _compared(config, inputs, row, point) for row in rows]
            squares = of_group(config.beta, advantages, gains)
            for row, square in zip(rows, squares, strict=True):
                weight = float(inputs.weights[row])
                total += weight * square
                weights += weight
                if config.kl_coef:
                    shift = inputs.velocities["live"][row, point] - inputs.velocities["reference"][row, point]
                    total += weight * config.kl_coef * float(np.mean(shift**2))
    return total / weights if weights else 0.0


def of_group(beta: float, rewards: Sequence[float], gains: Sequence[float]) -> list[float]:
    """The squared difference of each sample's centred implied reward, beta times its gain, and its centred reward."""
    reward, gain = sum(rewards) / len(rewards), sum(gains) / len(gains)
    return [(beta * (own - gain) - (given - reward)) ** 2 for given, own in zip(rewards, gains, strict=True)]


def _compared(config: CrdConfig, inputs: PointLossInputs, row: int, point: int) -> float:
    return _elbo(config, inputs, "lagged" if config.moving_reference else "reference", row, point)


def _elbo(config: CrdConfig, inputs: PointLossInputs, policy: str, row: int, point: int) -> float:
    """x = (1 - s) x0 + s x1, so that the target x1 - x0 is (x - x0) / s."""
    sigma = float(inputs.sigma[row, point])
    target = (inputs.x[row, point] - inputs.clean[row]) / sigma
    error = float(np.mean((inputs.velocities[policy][row, point] - target) ** 2))
    if config.weighting == "uniform":
        return -error
    fixed = inputs.detached.velocities[policy][row, point] - target
    return -(sigma**2) * error / max(sigma * float(np.mean(np.abs(fixed))), 1e-5)
