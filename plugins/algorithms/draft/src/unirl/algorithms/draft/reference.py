"""Reference implementation of the DRaFT loss, from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed. The gradient is a claim of its own.
"""

from __future__ import annotations

from unirl.algorithms.draft.config import DraftConfig
from unirl.conformance.reference import RewardLossInputs

__all__ = ["loss"]


def loss(config: DraftConfig, inputs: RewardLossInputs) -> float:
    """The negative reward, or what it lacks to `reward_limit`: the mean over all draws of all samples.

    Source: arXiv 2309.17400, equation 1; with the limit the code of arXiv 2304.05977.
    """
    total, weights = 0.0, 0.0
    for rewards, weight in zip(inputs.rewards, inputs.weights, strict=True):
        for reward in rewards if weight else ():
            value = -float(reward) if config.reward_limit is None else max(config.reward_limit - float(reward), 0.0)
            total += float(weight) * value
            weights += float(weight)
    return total / weights if weights else 0.0
