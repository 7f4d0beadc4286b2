"""Reference implementation of flow-matching regression, point by point from its formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import numpy as np
from unirl.algorithms.sft.config import SftConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss"]


def loss(config: SftConfig, inputs: PointLossInputs) -> float:
    """Weighted mean over all points of all samples of the squared error per element (arXiv 2210.02747, equation 9)."""
    total, weights = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        for point in range(config.num_points) if weight else ():
            # x = (1 - s) x0 + s x1, so that the target x1 - x0 is (x - x0) / s.
            target = (inputs.x[row, point] - inputs.clean[row]) / inputs.sigma[row, point]
            total += float(weight) * float(np.mean((inputs.velocities["live"][row, point] - target) ** 2))
            weights += float(weight)
    return total / weights if weights else 0.0
