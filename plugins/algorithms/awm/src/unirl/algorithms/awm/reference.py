"""Reference implementation of the loss of advantage weighted matching, point by point, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

import numpy as np
from unirl.algorithms.awm.config import AwmConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["log_prob", "loss"]


def loss(config: AwmConfig, inputs: PointLossInputs) -> float:
    """PPO's bound (arXiv 1707.06347, equation 7) on ratios of the log-probs of arXiv 2509.25050; plus the coefficients
    times the squared distances to the reference and to the lagged policy."""
    total = sum(float(weight) * _of_sample(config, inputs, row) for row, weight in enumerate(inputs.weights) if weight)
    weights = float(np.sum(inputs.weights))
    return total / weights if weights else 0.0


def log_prob(config: AwmConfig, error: float, sigma: float) -> float:
    """Surrogate for the log-prob of a sample at a point, from its flow-matching error there."""
    tiny, power = 1e-10, config.ghuber_power
    return {
        "uniform": -error,
        "t": -error * sigma,
        "t2": -error * sigma**2,
        "huber": -sigma * (math.sqrt(error + tiny) - math.sqrt(tiny)),
        "ghuber": -sigma / power * ((error + tiny) ** power - tiny**power),
    }[config.weighting]


def _of_sample(config: AwmConfig, inputs: PointLossInputs, row: int) -> float:
    live, old, count = inputs.velocities["live"][row], inputs.old_log_probs[row], config.num_points
    # x = (1 - s) x0 + s x1, so that x1 - x0 = (x - x0) / s.
    levels = inputs.sigma[row].reshape(-1, *(1,) * (live.ndim - 1))
    errors = [float(np.mean(square)) for square in (live - (inputs.x[row] - inputs.clean[row]) / levels) ** 2]
    log_ratios = [log_prob(config, errors[k], float(inputs.sigma[row, k])) - float(old[k]) for k in range(count)]
    if config.ratio_over == "sample":
        log_ratios = [sum(log_ratios) / count]
    advantage, clip = float(inputs.advantages[row]), config.clip_range
    policy = 0.0
    for ratio in map(math.exp, log_ratios):
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        policy += max(-advantage * ratio, -advantage * clipped) / len(log_ratios)
    result = config.scale * policy
    for name, coefficient in (("reference", config.kl_coef), ("lagged", config.lagged_coef)):
        if coefficient:
            result += coefficient * float(np.mean((live - inputs.velocities[name][row]) ** 2))
    return result
