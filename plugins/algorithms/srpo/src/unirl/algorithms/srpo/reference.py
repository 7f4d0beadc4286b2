"""Reference implementation of the SRPO loss, from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout. The gradient is a separate claim.
"""

from __future__ import annotations

from unirl.algorithms.srpo.config import SrpoConfig
from unirl.conformance.reference import RewardLossInputs, reward_loss

__all__ = ["loss"]


def loss(config: SrpoConfig, inputs: RewardLossInputs) -> float:
    """Discounted mean of the losses at all points, of which the last is the noisiest (arXiv 2509.06942)."""
    count = config.num_points
    return reward_loss(config, inputs, draw_weights=[config.discount ** (count - 1 - point) for point in range(count)])
