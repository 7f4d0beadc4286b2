"""The loss of DRPO and SPO once more, token by token from the paper's formula: what the algorithm is held against.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unirl.algorithms.drpo.config import DrpoConfig

__all__ = ["TokenLossInputs", "loss"]


@dataclass(frozen=True, kw_only=True)
class TokenLossInputs:
    """The numbers that the loss is made of: fp64 NumPy arrays of n texts with up to S tokens each."""

    log_probs: Any
    """[n, S] under the weights that train."""
    old_log_probs: Any
    """[n, S] that the ratio compares with."""
    valid: Any
    """[n, S] bool: tokens that are trained on."""
    advantages: Any
    """[n]."""
    weights: Any
    """[n] weights of the texts; 0 counts nowhere."""
    is_truncated: Any
    """[n] bool: stopped by the length limit."""


def loss(config: DrpoConfig, inputs: TokenLossInputs) -> float:
    """arXiv 2606.09821, summed over each text and averaged as the aggregation says."""
    total, count = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight == 0 or not tokens or (config.truncated == "mask" and inputs.is_truncated[row]):
            continue
        summed = sum(_of_token(config, inputs, row, token) for token in tokens)
        if config.aggregation == "token-mean":
            total, count = total + weight * summed, count + weight * len(tokens)
            continue
        divisor = {
            "seq-mean-token-mean": len(tokens),
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": config.horizon,
        }[config.aggregation]
        total, count = total + weight * summed / divisor, count + weight
    return float(total / count) if count else 0.0


def _of_token(config: DrpoConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    advantage = float(inputs.advantages[row])
    live, old = float(inputs.log_probs[row, token]), float(inputs.old_log_probs[row, token])
    # The paper bounds the log-ratio, so that one token cannot overflow.
    ratio = math.exp(max(-20.0, min(20.0, live - old)))
    weight = math.exp(old) if config.weighs_by_old else 1.0
    return -advantage * ratio + abs(advantage) * weight * (ratio - 1) ** 2 / (2 * config.delta)
