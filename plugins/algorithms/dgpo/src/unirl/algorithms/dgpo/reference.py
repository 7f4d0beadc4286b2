"""Reference implementation of the DGPO loss, group by group from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from unirl.algorithms.dgpo.config import DgpoConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss", "of_group"]


def loss(config: DgpoConfig, inputs: PointLossInputs) -> float:
    """Mean over all points of all groups, each group as often as it has samples (arXiv 2510.08425), plus `kl_coef`
    times the squared distance to the reference."""
    total, weights = 0.0, 0.0
    for group in inputs.units:
        rows = [row for row in group if inputs.weights[row]]
        advantages = [float(inputs.advantages[row]) for row in rows]
        if len(set(advantages)) < 2:
            continue
        weight = sum(float(inputs.weights[row]) for row in rows)
        for point in range(config.num_points):
            compared = "lagged" if config.moving_reference else "reference"
            errors = [[_error(inputs, policy, row, point) for row in rows] for policy in ("live", compared)]
            total += weight * of_group(config.beta, advantages, *errors)
            for row in rows if config.kl_coef else ():
                shift = inputs.velocities["live"][row, point] - inputs.velocities["reference"][row, point]
                total += float(inputs.weights[row]) * config.kl_coef * float(np.mean(shift**2))
            weights += weight
    return total / weights if weights else 0.0


def of_group(beta: float, advantages: Sequence[float], errors: Sequence[float], reference: Sequence[float]) -> float:
    """-log sigmoid(R(better) - R(worse)): the implied reward of a set of samples is the sum over them of |A| times beta
    times how much smaller than the reference's the error is, over the number of samples of the group."""
    size = len(advantages)
    centre = sum(advantages) / size
    better = worse = 0.0
    for advantage, own, other in zip(advantages, errors, reference, strict=True):
        implied = abs(advantage - centre) * beta * (other - own) / size
        if advantage > centre:
            better += implied
        else:
            worse += implied
    inside = better - worse
    # log(1 + exp(-z)) without overflow.
    return max(-inside, 0.0) + math.log1p(math.exp(-abs(inside)))


def _error(inputs: PointLossInputs, policy: str, row: int, point: int) -> float:
    """x = (1 - s) x0 + s x1, so that the target x1 - x0 is (x - x0) / s."""
    target = (inputs.x[row, point] - inputs.clean[row]) / inputs.sigma[row, point]
    return float(np.mean((inputs.velocities[policy][row, point] - target) ** 2))
