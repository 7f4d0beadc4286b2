"""Reference implementation of the PPO loss over denoise steps, step by step from the papers' formulas, for conformance
tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.ppo.config import FlowPpoConfig
from unirl.algorithms.ppo.reference import generalized_advantages
from unirl.conformance.reference import LossInputs

__all__ = ["loss"]


def loss(config: FlowPpoConfig, inputs: LossInputs) -> float:
    """Means over the steps of all samples: of the policy loss, of the value loss with its coefficient, and of the KL
    divergence with its own. Advantages and returns are computed from rewards and old values."""
    counted: list[tuple[int, int, float]] = []
    advantages: list[float] = []
    returns: list[float] = []
    for row, weight in enumerate(inputs.weights):
        columns = [column for column, step in enumerate(inputs.sde_steps[row]) if step >= 0]
        if weight == 0 or not columns:
            continue
        rewards = [0.0] * (len(columns) - 1) + [float(inputs.rewards[row])]
        values = [float(inputs.old_values[row, column]) for column in columns]
        one, other = generalized_advantages(rewards, values, gamma=config.gamma, lam=config.gae_lambda)
        counted += [(row, column, float(weight)) for column in columns]
        advantages, returns = advantages + one, returns + other
    if config.whiten_advantages and counted:
        mean = sum(advantages) / len(advantages)
        # Bessel's variance, with the usual 1e-8.
        squares = sum((value - mean) ** 2 for value in advantages)
        advantages = [(value - mean) / math.sqrt(squares / max(len(counted) - 1, 1) + 1e-8) for value in advantages]
    total = 0.0
    for (row, column, weight), advantage, expected in zip(counted, advantages, returns, strict=True):
        own = _policy(config, inputs, row, column, advantage)
        own += config.value_coef * _value(config, inputs, row, column, expected)
        if config.kl_coef:
            # Two Gaussians with one std, per element.
            shift = float(((inputs.means[row, column] - inputs.reference_means[row, column]) ** 2).mean())
            own += config.kl_coef * shift / (2 * float(inputs.std[row, column]) ** 2)
        total += weight * own
    return total / sum(weight for _, _, weight in counted) if counted else 0.0


def _policy(config: FlowPpoConfig, inputs: LossInputs, row: int, column: int, advantage: float) -> float:
    """PPO, arXiv 1707.06347, equation 7: the pessimistic bound of the clipped ratio, to be minimised."""
    ratio = math.exp(float(inputs.log_probs[row, column] - inputs.old_log_probs[row, column]))
    low, high = config.clip_bounds
    return -min(advantage * ratio, advantage * min(max(ratio, 1 - low), 1 + high))


def _value(config: FlowPpoConfig, inputs: LossInputs, row: int, column: int, expected: float) -> float:
    """Half the squared error of the value, or of the value clipped around the old one, whichever is larger."""
    value, old = float(inputs.values[row, column]), float(inputs.old_values[row, column])
    errors = [value - expected]
    if config.clip_range_value is not None:
        errors.append(min(max(value, old - config.clip_range_value), old + config.clip_range_value) - expected)
    return max(error * error for error in errors) / 2
