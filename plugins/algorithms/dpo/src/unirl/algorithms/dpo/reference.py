"""Reference implementation of the DPO loss, pair by pair from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.dpo.config import DpoConfig
from unirl.conformance.reference import TokenLossInputs

__all__ = ["loss", "of_gains"]


def loss(config: DpoConfig, inputs: TokenLossInputs) -> float:
    """Mean over all pairs in which both completions count (arXiv 2305.18290, equation 7)."""
    values: list[float] = []
    for pair in inputs.units:
        if len(pair) == 2 and all(inputs.weights[row] for row in pair):
            winner, loser = sorted(pair, key=lambda row: -inputs.advantages[row])
            values.append(of_gains(config, _gain(config, inputs, winner), _gain(config, inputs, loser)))
    return sum(values) / len(values) if values else 0.0


def of_gains(config: DpoConfig, winner: float, loser: float) -> float:
    """-log sigmoid(z) with z = beta (gain of the winner - gain of the loser); smoothed as conservative DPO does."""
    z, smoothing = config.beta * (winner - loser), config.label_smoothing
    return (1 - smoothing) * _softplus(-z) + smoothing * _softplus(z)


def _gain(config: DpoConfig, inputs: TokenLossInputs, row: int) -> float:
    """log pi(y | x) - log pi_ref(y | x)."""
    tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
    total = sum(float(inputs.log_probs[row, t] - inputs.reference_log_probs[row, t]) for t in tokens)
    return total / max(len(tokens), 1) if config.length_normalized else total


def _softplus(x: float) -> float:
    # log(1 + exp(x)) without overflow.
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
