"""Reference implementation of the Diffusion-DPO loss, pair by pair from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

import numpy as np
from unirl.algorithms.diffusion_dpo.config import DiffusionDpoConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss", "of_errors"]


def loss(config: DiffusionDpoConfig, inputs: PointLossInputs) -> float:
    """Mean over all points of all pairs in which both samples count (arXiv 2311.12908, equation 14)."""
    values: list[float] = []
    for pair in inputs.units:
        if len(pair) < 2 or not all(inputs.weights[row] for row in pair):
            continue
        winner, loser = sorted(pair, key=lambda row: -inputs.advantages[row])
        for point in range(config.num_points):
            errors = [_error(inputs, policy, row, point) for row in (winner, loser) for policy in ("live", "reference")]
            values.append(of_errors(config.beta, *errors))
    return sum(values) / len(values) if values else 0.0


def of_errors(beta: float, winner: float, winner_reference: float, loser: float, loser_reference: float) -> float:
    """-log sigmoid(-beta / 2 ((m_w - m_w^ref) - (m_l - m_l^ref)))."""
    inside = -0.5 * beta * ((winner - winner_reference) - (loser - loser_reference))
    # log(1 + exp(-z)) without overflow.
    return max(-inside, 0.0) + math.log1p(math.exp(-abs(inside)))


def _error(inputs: PointLossInputs, policy: str, row: int, point: int) -> float:
    """x = (1 - s) x0 + s x1, so that the target x1 - x0 is (x - x0) / s."""
    target = (inputs.x[row, point] - inputs.clean[row]) / inputs.sigma[row, point]
    return float(np.mean((inputs.velocities[policy][row, point] - target) ** 2))
