"""Reference implementations of the losses, from their formulas, for conformance tests.

They share no code with the algorithms. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from unirl.algorithms.distillation.config import DistillationConfig, Dmd2Config, VelocityDistillationConfig
from unirl.conformance.reference import PointLossInputs, TokenLossInputs, TokenMean

__all__ = ["divergence", "matching_loss", "token_loss", "velocity_loss"]


def token_loss(config: DistillationConfig, inputs: TokenLossInputs) -> float:
    """GKD, arXiv 2306.13649, equations 2 and 3: the mean over each completion, then over completions."""
    mean = TokenMean(config.aggregation, horizon=1)
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight and tokens:
            places = [(np.exp(inputs.distributions[name][row, tokens])) for name in ("live", "reference")]
            mean.add([divergence(config, p, q) for p, q in zip(*places, strict=True)], float(weight))
    return mean.value


def divergence(config: DistillationConfig, student: Any, teacher: Any) -> float:
    """Divergence of two distributions [V], in nats."""
    if config.top_k is not None:
        likeliest = np.argsort(-teacher)[: config.top_k]
        student, teacher = (
            np.append(probs[likeliest], np.delete(probs, likeliest).sum()) for probs in (student, teacher)
        )
    if config.divergence == "forward":
        return _kl(teacher, student)
    if config.divergence == "reverse":
        return _kl(student, teacher)
    # GKD, equation 1.
    mixture = config.beta * teacher + (1 - config.beta) * student
    return config.beta * _kl(teacher, mixture) + (1 - config.beta) * _kl(student, mixture)


def velocity_loss(config: VelocityDistillationConfig, inputs: PointLossInputs) -> float:
    """Weighted mean over all points of all samples of the squared difference per element."""
    total, weights = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        for point in range(config.num_points) if weight else ():
            difference = inputs.velocities["live"][row, point] - inputs.velocities["reference"][row, point]
            total += float(weight) * float(np.mean(difference**2))
            weights += float(weight)
    return total / weights if weights else 0.0


def matching_loss(config: Dmd2Config, inputs: PointLossInputs) -> float:
    """Weighted mean over all points of both losses.

    Of the student: half the squared distance of its clean estimate x0 from x0 - g, of which nothing but x0 itself is
    varied; g = (mu_fake - mu_real) / mean |x0 - mu_real| (DMD, arXiv 2311.18828, equations 7 and 8, where the factor of
    the score's difference turns it into that of the clean estimates mu). Of the fake score: flow matching on x0.
    """
    matched, learnt = inputs.further
    total, weights = 0.0, 0.0
    for row, weight in enumerate(inputs.weights):
        for point in range(config.num_points) if weight else ():
            start, level = inputs.x[row, point], inputs.sigma[row, point]
            clean, fixed = (start - level * each.velocities["live"][row, point] for each in (inputs, inputs.detached))
            x, sigma = matched.x[row, point], matched.sigma[row, point]
            fake, real = (x - sigma * matched.velocities[name][row, point] for name in ("fake", "reference"))
            gradient = (fake - real) / max(float(np.mean(np.abs(fixed - real))), 1e-5)
            student = 0.5 * float(np.mean((clean - (fixed - gradient)) ** 2))
            x, sigma = learnt.x[row, point], learnt.sigma[row, point]
            noise = (x - (1 - sigma) * fixed) / sigma
            denoised = float(np.mean((learnt.velocities["fake"][row, point] - (noise - fixed)) ** 2))
            total += float(weight) * (student + denoised)
            weights += float(weight)
    return total / weights if weights else 0.0


def _kl(first: Any, second: Any) -> float:
    there = first > 0
    return float(np.sum(first[there] * (np.log(first[there]) - np.log(second[there]))))
