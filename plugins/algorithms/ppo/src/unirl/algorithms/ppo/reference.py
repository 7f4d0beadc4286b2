"""The loss of PPO once more, token by token from the papers' formulas: what the algorithm is held against.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.ppo.config import PpoConfig
from unirl.core.reference import TokenLossInputs, TokenMean, clipped_token, token_divergence, token_importance

__all__ = ["generalized_advantages", "loss"]


def loss(config: PpoConfig, inputs: TokenLossInputs) -> float:
    """The policy loss and the critic's, plus the divergence and less the entropy, each with its factor."""
    policy, value, kl, entropy = (TokenMean(config.aggregation, horizon=config.horizon or 1.0) for _ in range(4))
    has_kl = config.kl_coef > 0 and not config.kl_in_reward
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight == 0 or not tokens or (config.truncated == "mask" and inputs.is_truncated[row]):
            continue
        policy.add([_policy(config, inputs, row, token, tokens) for token in tokens], float(weight))
        value.add([_value(config, inputs, row, token) for token in tokens], float(weight))
        if has_kl:
            kl.add([token_divergence(config, inputs, row, token) for token in tokens], float(weight))
        entropy.add([float(inputs.entropy[row, token]) for token in tokens], float(weight))
    return (
        policy.value
        + config.value_coef * value.value
        + (config.kl_coef * kl.value if has_kl else 0.0)
        - config.entropy_coef * entropy.value
    )


def generalized_advantages(
    rewards: list[float], values: list[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of the tokens of one text: the double sum of arXiv 1506.02438, equation 16."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    found = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    return found, [advantage + value for advantage, value in zip(found, values, strict=True)]


def _policy(config: PpoConfig, inputs: TokenLossInputs, row: int, token: int, tokens: list[int]) -> float:
    ratio = math.exp(float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token]))
    own = clipped_token(config, ratio, float(inputs.advantages[row, token]))
    return own * token_importance(config, inputs, row, token, tokens)


def _value(config: PpoConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    """Half the square of the error, or of that of the value clipped to the old one, whichever is larger."""
    value, old, wanted = (float(x[row, token]) for x in (inputs.values, inputs.old_values, inputs.returns))
    errors = [value - wanted]
    if config.clip_range_value is not None:
        errors.append(min(max(value, old - config.clip_range_value), old + config.clip_range_value) - wanted)
    return max(error * error for error in errors) / 2
