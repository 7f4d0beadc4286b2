"""Reference implementations of both losses, point by point and token by token, for conformance tests.

They share no code with the algorithms. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import numpy as np
from unirl.algorithms.sft.config import SftConfig, TextSftConfig
from unirl.conformance.reference import PointLossInputs, TokenLossInputs, TokenMean

__all__ = ["loss", "text_loss"]


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


def text_loss(config: TextSftConfig, inputs: TokenLossInputs) -> float:
    """Negative log-likelihood of the tokens that count."""
    mean = TokenMean(config.aggregation, horizon=1)
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight and tokens:
            mean.add([-float(inputs.log_probs[row, token]) for token in tokens], float(weight))
    return mean.value
