"""Reference implementation of the DRPO and SPO loss, token by token from the paper's formula, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.drpo.config import DrpoConfig
from unirl.conformance.reference import TokenLossInputs, TokenMean, token_divergence

__all__ = ["loss"]


def loss(config: DrpoConfig, inputs: TokenLossInputs) -> float:
    """arXiv 2606.09821, summed over each completion and averaged by the aggregation, plus `kl_coef` times the KL to the
    reference policy."""
    policy, kl = (TokenMean(config.aggregation, horizon=config.horizon) for _ in range(2))
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight == 0 or not tokens or (config.truncated == "mask" and inputs.is_truncated[row]):
            continue
        policy.add([_of_token(config, inputs, row, token) for token in tokens], float(weight))
        if config.kl_coef:
            kl.add([token_divergence(config, inputs, row, token) for token in tokens], float(weight))
    return policy.value + config.kl_coef * kl.value


def _of_token(config: DrpoConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    advantage = float(inputs.advantages[row])
    live, old = float(inputs.log_probs[row, token]), float(inputs.old_log_probs[row, token])
    # The paper bounds the log-ratio, so that one token cannot overflow.
    ratio = math.exp(max(-20.0, min(20.0, live - old)))
    weight = math.exp(old) if config.weighs_by_old else 1.0
    return -advantage * ratio + abs(advantage) * weight * (ratio - 1) ** 2 / (2 * config.delta)
