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
        counts = weight * (inputs.advantages[row] != 0) if config.drop_zero_advantage else weight
        for column, step in enumerate(inputs.sde_steps[row]):
            if step >= 0:
                policy.add(_policy(config, inputs, row, column), float(counts))
                kl.add(_divergence(config, inputs, row, column), float(weight))
    return policy.value + config.kl_coef * kl.value


def _policy(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """PPO's clipped objective (arXiv 1707.06347, equation 7), to be minimised, times the weight of the step."""
    advantage = float(inputs.advantages[row])
    ratio = math.exp(_log_ratio(config, inputs, row, column))
    low = _scheduled(config.clip_schedule, config.clip_range, inputs.progress)
    high = low
    if config.clip_range_high is not None:
        high = _scheduled(config.clip_schedule, config.clip_range_high, inputs.progress)
    # The pessimistic bound: the upper clip limits gains, the lower clip limits the reduction of losses.
    if advantage >= 0:
        value = -advantage * min(ratio, 1 + high)
    else:
        factor = max(ratio, 1 - low)
        # Dual clip, arXiv 1912.09729: a sample with negative advantage costs no more than this.
        value = -advantage * (factor if config.dual_clip is None else min(factor, config.dual_clip))
    return value * _step_weight(config.step_weight, inputs, row, column)


def _log_ratio(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    plain = float(inputs.log_probs[row, column] - inputs.old_log_probs[row, column])
    if not config.ratio_norm:
        return plain
    # GRPO-Guard, arXiv 2510.22319: under the old policy the log-ratio has mean -shift^2 / (2 s^2).
    std = float(inputs.std[row, column])
    shift = float(((inputs.means[row, column] - inputs.old_means[row, column]) ** 2).mean())
    return std * (plain + shift / (2 * std**2))


def _step_weight(kind: str, inputs: LossInputs, row: int, column: int) -> float:
    if kind == "inverse-dt":
        step = int(inputs.sde_steps[row, column])
        return 1 / float(inputs.sigmas[step] - inputs.sigmas[step + 1])
    if kind == "noise":
        # TempFlow-GRPO, arXiv 2508.04324.
        own = [float(std) for std, step in zip(inputs.std[row], inputs.sde_steps[row], strict=True) if step >= 0]
        return float(inputs.std[row, column]) * len(own) / sum(own)
    assert kind == "uniform", kind
    return 1.0


def _divergence(config: FlowGrpoConfig, inputs: LossInputs, row: int, column: int) -> float:
    """KL per element of two Gaussians with the same std; the published code has g, which is s / sqrt(-dt)."""
    if not config.kl_coef:
        return 0.0
    scale = float((inputs.std if config.kl_form == "gaussian" else inputs.g)[row, column])
    shift = float(((inputs.means[row, column] - inputs.reference_means[row, column]) ** 2).mean())
    return shift / (2 * scale**2)


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
