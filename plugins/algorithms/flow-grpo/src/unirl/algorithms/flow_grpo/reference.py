"""Reference implementation of the Flow-GRPO loss, element by element from the papers' formulas, for conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
from unirl.conformance.reference import LossInputs

__all__ = ["loss"]


def loss(config: FlowGrpoConfig, inputs: LossInputs) -> float:
    """Mean of the policy loss over the SDE steps of all samples, plus `kl_coef` times the mean of the KL divergence."""
    policy, kl = _Mean(), _Mean()
    for row, weight in enumerate(inputs.weights):
        if weight == 0:
            continue
        for column, step in enumerate(inputs.sde_steps[row]):
            if step >= 0:
                counts = weight * (_advantage(inputs, row, column) != 0) if config.drop_zero_advantage else weight
                policy.add(_policy(config, inputs, row, column), float(counts))
                kl.add(inputs.kl_weight(row) * _divergence(config, inputs, row, column), float(weight))
    return policy.value + config.kl_coef * kl.value


def _policy(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """The policy loss of one step, to be minimised, times the weight of the step."""
    value = {"clip": _clip, "cispo": _cispo, "divergence": _masked}[config.loss](config, inputs, row, column)
    return value * _step_weight(config.step_weight, inputs, row, column)


def _advantage(inputs: LossInputs, row: int, column: int) -> float:
    """That of the sample, or of the step where each has its own."""
    return float(inputs.advantages[row] if inputs.advantages.ndim == 1 else inputs.advantages[row, column])


def _clip(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """PPO's clipped objective, arXiv 1707.06347, equation 7."""
    advantage = _advantage(inputs, row, column)
    columns = [column]
    if config.ratio == "sequence":  # GSPO, arXiv 2507.18071, equation 7: the geometric mean over the steps.
        columns = [place for place, step in enumerate(inputs.sde_steps[row]) if step >= 0]
    ratio = math.exp(sum(_log_ratio(config, inputs, row, place) for place in columns) / len(columns))
    low, high = _bounds(config, inputs)
    # The pessimistic bound: the upper clip limits gains, the lower clip limits the reduction of losses.
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    factor = max(ratio, 1 - low)
    # Dual clip, arXiv 1912.09729: a sample with negative advantage costs no more than this.
    return -advantage * (factor if config.dual_clip is None else min(factor, config.dual_clip))


def _cispo(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """CISPO, arXiv 2506.13585, equations 4 and 5."""
    low, high = _bounds(config, inputs)
    weight = min(max(math.exp(_log_ratio(config, inputs.detached, row, column)), 1 - low), 1 + high)
    return -weight * _advantage(inputs, row, column) * float(inputs.log_probs[row, column])


def _masked(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """Flow-DPPO, arXiv 2606.11025: no loss where the policy is far from the old one and would go further."""
    assert config.threshold is not None
    advantage, ratio = _advantage(inputs, row, column), math.exp(_log_ratio(config, inputs, row, column))
    shift = float(((inputs.means[row, column] - inputs.old_means[row, column]) ** 2).mean())
    is_far = shift / (2 * float(inputs.std[row, column]) ** 2) >= config.threshold
    return 0.0 if is_far and advantage * (ratio - 1) > 0 else -advantage * ratio


def _bounds(config: FlowGrpoConfig, inputs: LossInputs) -> tuple[float, float]:
    """Lower and upper clip range at this point of the run."""
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    low, high = (_scheduled(config.clip_schedule, value, inputs.progress) for value in (config.clip_range, high))
    return low, high


def _log_ratio(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    plain = float(inputs.log_probs[row, column] - inputs.old_log_probs[row, column])
    if not config.ratio_norm:
        return plain
    # GRPO-Guard, arXiv 2510.22319: under the old policy the log-ratio has mean -shift^2 / (2 s^2).
    std = float(inputs.std[row, column])
    shift = float(((inputs.means[row, column] - inputs.old_means[row, column]) ** 2).mean())
    return std * (plain + shift / (2 * std**2))


def _step_weight(kind: str, inputs: LossInputs, row: int, column: int) -> float:
    step = int(inputs.sde_steps[row, column])
    if kind == "inverse-dt":
        return 1 / float(inputs.sigmas[step] - inputs.sigmas[step + 1])
    if kind == "noise":
        # TempFlow-GRPO, arXiv 2508.04324, equation 8.
        every = [g * math.sqrt(sigma - after) for sigma, after, g in _schedule(inputs)]
        return every[step] * len(every) / sum(every)
    assert kind == "uniform", kind
    return 1.0


def _schedule(inputs: LossInputs) -> list[tuple[float, float, float]]:
    """sigma, sigma' and g of every step of Flow-SDE, arXiv 2505.05470; at sigma 1 the second sigma in 1 - sigma."""
    assert inputs.sampler is not None and inputs.sampler.kernel == "flow-sde", (
        "the reference knows the coefficients of one kernel"
    )
    sigmas = [float(sigma) for sigma in inputs.sigmas]
    singular = [sigmas[1] if sigma == 1 else sigma for sigma in sigmas]
    gs = [inputs.sampler.eta * math.sqrt(sigma / (1 - other)) for sigma, other in zip(sigmas, singular, strict=True)]
    return list(zip(sigmas[:-1], sigmas[1:], gs[:-1], strict=True))


def _divergence(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """KL per element of two Gaussians with the same std; the published code has g, which is s / sqrt(-dt). Or the
    squared difference of the velocities, which make the means: x (...) + v (1 + g^2 (1 - sigma) / (2 sigma)) dt."""
    if not config.kl_coef:
        return 0.0
    shift = float(((inputs.means[row, column] - inputs.reference_means[row, column]) ** 2).mean())
    weight = _step_weight(config.kl_step_weight, inputs, row, column)
    if config.kl_form == "velocity":
        sigma, after, g = _schedule(inputs)[int(inputs.sde_steps[row, column])]
        return weight * shift / ((1 + g**2 * (1 - sigma) / (2 * sigma)) * (after - sigma)) ** 2
    scale = float((inputs.std if config.kl_form == "gaussian" else inputs.g)[row, column])
    return weight * shift / (2 * scale**2)


def _scheduled(schedule: str, value: float, progress: float) -> float:
    if schedule == "linear":
        return value * (2 - progress) / 2
    if schedule == "cosine":
        return value * math.cos(math.pi * progress / 2) ** 2
    assert schedule == "constant", schedule
    return value


@dataclass
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        # Values at weight 0 may be NaN.
        if weight:
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0
