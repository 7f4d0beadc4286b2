"""Reference implementation of the DPOK loss, step by step from the paper's formulas, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed. The penalty is that of `flow-sde` and
`dance-sde`, whose means are Euler steps corrected by half g^2 times the score.
"""

from __future__ import annotations

import math

from unirl.algorithms.dpok.config import DpokConfig
from unirl.conformance.reference import LossInputs

__all__ = ["loss"]


def loss(config: DpokConfig, inputs: LossInputs) -> float:
    """Mean over the steps of all samples of -w A clip(r), plus `kl_coef` times that of the squared velocity distance;
    with a critic plus half the mean squared error of its values."""
    policy = penalty = value = count = 0.0
    for row, weight in enumerate(inputs.weights):
        for column, step in enumerate(inputs.sde_steps[row]):
            if weight == 0 or step < 0:
                continue
            count += weight
            policy += weight * _policy(config, inputs, row, column)
            if config.kl_coef:
                penalty += weight * inputs.kl_weight(row) * _penalty(inputs, row, column)
            if config.critic:
                value += weight * (float(inputs.values[row, column]) - float(inputs.rewards[row])) ** 2 / 2
    return (config.reward_weight * policy + config.kl_coef * penalty + value) / count if count else 0.0


def _policy(config: DpokConfig, inputs: LossInputs, row: int, column: int) -> float:
    """The clip alone, without PPO's minimum: the published code."""
    ratio = math.exp(float(inputs.log_probs[row, column] - inputs.old_log_probs[row, column]))
    if config.critic:
        advantage = float(inputs.rewards[row]) - float(inputs.old_values[row, column])
    else:
        advantage = float(inputs.advantages[row])
    return -advantage * min(max(ratio, 1 - config.clip_range), 1 + config.clip_range)


def _penalty(inputs: LossInputs, row: int, column: int) -> float:
    """mean (v - v_ref)^2. The mean of a step is x + dt (v + g^2 / (2 sigma) (x + (1 - sigma) v)), Flow-GRPO, arXiv
    2505.05470, so that a change of v moves it by dt (1 + g^2 (1 - sigma) / (2 sigma)) times as much."""
    step = int(inputs.sde_steps[row, column])
    sigma, length = float(inputs.sigmas[step]), float(inputs.sigmas[step + 1] - inputs.sigmas[step])
    gain = length * (1 + float(inputs.g[row, column]) ** 2 * (1 - sigma) / (2 * sigma))
    shift = float(((inputs.means[row, column] - inputs.reference_means[row, column]) ** 2).mean())
    return shift / gain**2
