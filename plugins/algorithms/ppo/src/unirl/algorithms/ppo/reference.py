"""Reference implementation of the PPO loss, token by token from the papers' formulas, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import dataclasses
import math

from unirl.algorithms.ppo.config import PpoConfig
from unirl.conformance.reference import TokenLossInputs, TokenMean, clipped_token, token_divergence, token_importance

__all__ = ["generalized_advantages", "loss"]


def loss(config: PpoConfig, inputs: TokenLossInputs) -> float:
    """The policy and value loss, plus the KL and minus the entropy, each with its coefficient.

    Advantages and returns are computed from rewards and old values unless they are given.
    """
    if inputs.advantages is None:
        inputs = _judged(config, inputs)
    policy, value, kl, entropy = (TokenMean(config.aggregation, horizon=config.horizon or 1.0) for _ in range(4))
    has_kl = config.kl_coef > 0 and not config.kl_in_reward
    for row, weight in enumerate(inputs.weights):
        tokens = _tokens(config, inputs, row)
        if not tokens:
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
    """Advantages and returns of the tokens of one completion: the double sum of arXiv 1506.02438, equation 16."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    result = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    return result, [advantage + value for advantage, value in zip(result, values, strict=True)]


def _judged(config: PpoConfig, inputs: TokenLossInputs) -> TokenLossInputs:
    """Per completion, the reward at the last token minus the KL at each; then normalised over the batch."""
    advantages, returns = 0.0 * inputs.old_values, 0.0 * inputs.old_values
    then = dataclasses.replace(inputs, log_probs=inputs.old_log_probs)
    counted: list[tuple[int, int]] = []
    for row in range(len(inputs.weights)):
        tokens = _tokens(config, inputs, row)
        if not tokens:
            continue
        rewards = [0.0] * (len(tokens) - 1) + [float(inputs.rewards[row])]
        if config.kl_in_reward and config.kl_coef > 0:
            divergence = [token_divergence(config, then, row, token) for token in tokens]
            rewards = [reward - config.kl_coef * kl for reward, kl in zip(rewards, divergence, strict=True)]
        values = [float(inputs.old_values[row, token]) for token in tokens]
        result = generalized_advantages(rewards, values, gamma=config.gamma, lam=config.gae_lambda)
        advantages[row, tokens], returns[row, tokens] = result
        counted += [(row, token) for token in tokens]
    if config.whiten_advantages and counted:
        mean = sum(float(advantages[place]) for place in counted) / len(counted)
        squares = sum((float(advantages[place]) - mean) ** 2 for place in counted)
        # Bessel's variance, with the usual 1e-8.
        spread = math.sqrt(squares / max(len(counted) - 1, 1) + 1e-8)
        for place in counted:
            advantages[place] = (float(advantages[place]) - mean) / spread
    return dataclasses.replace(inputs, advantages=advantages, returns=returns)


def _tokens(config: PpoConfig, inputs: TokenLossInputs, row: int) -> list[int]:
    """The valid tokens of a completion."""
    if inputs.weights[row] == 0 or (config.truncated == "mask" and inputs.is_truncated[row]):
        return []
    return [token for token, counts in enumerate(inputs.valid[row]) if counts]


def _policy(config: PpoConfig, inputs: TokenLossInputs, row: int, token: int, tokens: list[int]) -> float:
    ratio = math.exp(float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token]))
    own = clipped_token(config, ratio, float(inputs.advantages[row, token]))
    return own * token_importance(config, inputs, row, token, tokens)


def _value(config: PpoConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    """Half the squared error of the value, or of the value clipped around the old one, whichever is larger."""
    value, old, expected = (float(x[row, token]) for x in (inputs.values, inputs.old_values, inputs.returns))
    errors = [value - expected]
    if config.clip_range_value is not None:
        errors.append(min(max(value, old - config.clip_range_value), old + config.clip_range_value) - expected)
    return max(error * error for error in errors) / 2
