"""Reference implementation of the losses EPG, PEPG and PAR, sample by sample, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

import numpy as np
from unirl.algorithms.epg.config import EpgConfig
from unirl.conformance.reference import PointLossInputs

__all__ = ["loss", "of_ratio"]


def loss(config: EpgConfig, inputs: PointLossInputs) -> float:
    """The objectives of arXiv 2602.04663 with their sign turned, plus `kl_coef` times the squared distance to the
    reference."""
    total = sum(float(weight) * _of_sample(config, inputs, row) for row, weight in enumerate(inputs.weights) if weight)
    weights = float(np.sum(inputs.weights))
    return total / weights if weights else 0.0


def of_ratio(form: str, advantage: float, log_ratio: float, *, fixed: float) -> float:
    """The loss of one log-ratio; fixed: the same without gradient, for the stop-gradients of the paper.

    The objectives r A log p and r (A - log r) log p, r fixed, are moved by constants: to -r A where the gradient is
    taken, and for PEPG to r log r - r + 1 - r A.
    """
    ratio, step = math.exp(fixed), log_ratio - fixed
    if form == "epg":
        return -ratio * advantage * (1 + step)
    if form == "pepg":
        return -ratio * (advantage - fixed) * step - ratio * advantage + ratio * fixed - ratio + 1
    return 0.5 * ratio * (advantage - log_ratio) ** 2


def _of_sample(config: EpgConfig, inputs: PointLossInputs, row: int) -> float:
    old = inputs.old_log_probs[row]
    log_ratios = [_log_prob(config, inputs, row, point) - float(old[point]) for point in range(config.num_points)]
    fixed = [_log_prob(config, inputs.detached, row, point) - float(old[point]) for point in range(config.num_points)]
    if config.ratio_over == "sample":
        log_ratios, fixed = [sum(log_ratios) / len(log_ratios)], [sum(fixed) / len(fixed)]
    advantage = float(inputs.advantages[row])
    losses = [of_ratio(config.form, advantage, own, fixed=at) for own, at in zip(log_ratios, fixed, strict=True)]
    result = sum(losses) / len(losses)
    if config.kl_coef:
        shift = inputs.velocities["live"][row] - inputs.velocities["reference"][row]
        result += config.kl_coef * float(np.mean(shift**2))
    return result


def _log_prob(config: EpgConfig, inputs: PointLossInputs, row: int, point: int) -> float:
    """x = (1 - s) x0 + s x1, so that the target x1 - x0 is (x - x0) / s."""
    sigma = float(inputs.sigma[row, point])
    target = (inputs.x[row, point] - inputs.clean[row]) / sigma
    error = float(np.mean((inputs.velocities["live"][row, point] - target) ** 2))
    if config.weighting == "uniform":
        return -config.elbo_scale * error
    fixed = inputs.detached.velocities["live"][row, point] - target
    size = max(sigma * float(np.mean(np.abs(fixed))), 1e-5)
    return -config.elbo_scale * sigma**2 * error / size
