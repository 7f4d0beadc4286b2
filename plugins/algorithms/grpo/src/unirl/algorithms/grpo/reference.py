"""The loss of GRPO and its relatives once more, token by token from the papers' formulas: what the algorithm is held
against.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unirl.algorithms.grpo.config import GrpoConfig

__all__ = ["TokenLossInputs", "loss"]


@dataclass(frozen=True, kw_only=True)
class TokenLossInputs:
    """The numbers that a loss over tokens is made of: fp64 NumPy arrays of n texts with up to S tokens each."""

    log_probs: Any
    """[n, S] under the weights that train."""
    old_log_probs: Any
    """[n, S] that the ratio compares with."""
    engine_log_probs: Any
    """[n, S] as the engine gave them."""
    reference_log_probs: Any
    """[n, S] under the reference policy."""
    entropy: Any
    """[n, S] of the distributions of the tokens, in nats."""
    valid: Any
    """[n, S] bool: tokens that are trained on."""
    advantages: Any
    """[n]."""
    weights: Any
    """[n] weights of the texts; 0 counts nowhere."""
    is_truncated: Any
    """[n] bool: stopped by the length limit."""
    progress: float = 0.0
    """0 to 1 over the run."""


def loss(config: GrpoConfig, inputs: TokenLossInputs) -> float:
    """The policy loss, plus `kl_coef` times the divergence, less `entropy_coef` times the entropy."""
    policy, kl, entropy = (_Total(config) for _ in range(3))
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight == 0 or not tokens or (config.truncated == "mask" and inputs.is_truncated[row]):
            continue
        if inputs.advantages[row] != 0 or not config.drop_zero_advantage:
            policy.add([_policy(config, inputs, row, token, tokens) for token in tokens], float(weight))
        if config.kl_coef:
            kl.add([_divergence(config, inputs, row, token) for token in tokens], float(weight))
        entropy.add([float(inputs.entropy[row, token]) for token in tokens], float(weight))
    return policy.value + config.kl_coef * kl.value - config.entropy_coef * entropy.value


def _policy(config: GrpoConfig, inputs: TokenLossInputs, row: int, token: int, tokens: list[int]) -> float:
    """The loss of one token, to be minimised."""
    advantage = float(inputs.advantages[row])
    low = config.clip_range
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    own = float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token])
    if config.loss == "cispo":
        # CISPO, arXiv 2506.13585, equations 4 and 5.
        weight = min(max(math.exp(own), 1 - low), 1 + high)
        value = -weight * advantage * float(inputs.log_probs[row, token])
    else:
        # GSPO, arXiv 2507.18071, equation 7: the geometric mean over the text.
        whole = [float(inputs.log_probs[row, t] - inputs.old_log_probs[row, t]) for t in tokens]
        ratio = math.exp(sum(whole) / len(whole) if config.ratio == "sequence" else own)
        # PPO, arXiv 1707.06347, equation 7: the worse of the ratio and its clipped value.
        if advantage >= 0:
            value = -advantage * min(ratio, 1 + high)
        else:
            factor = max(ratio, 1 - low)
            # Dual clip, arXiv 1912.09729.
            value = -advantage * (factor if config.dual_clip is None else min(factor, config.dual_clip))
    return value * _importance(config, inputs, row, token, tokens)


def _importance(config: GrpoConfig, inputs: TokenLossInputs, row: int, token: int, tokens: list[int]) -> float:
    """How much likelier the old policy makes the token, or the text, than the engine did; bounded."""
    if config.tis == "none":
        return 1.0
    chosen = [token] if config.tis == "token" else tokens
    gap = sum(float(inputs.old_log_probs[row, t] - inputs.engine_log_probs[row, t]) for t in chosen)
    return min(math.exp(gap), config.tis_cap)


def _divergence(config: GrpoConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    """Schulman's estimators (2020) of the divergence from the reference, of one token."""
    difference = float(inputs.log_probs[row, token] - inputs.reference_log_probs[row, token])
    estimate = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) - 1 + difference}
    if not config.kl_weighs_by_ratio:
        return estimate[config.kl_estimator]
    # DeepSeek-V3.2, arXiv 2512.02556: the expectation is over samples of the old policy.
    ratio = math.exp(float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token]))
    return ratio * estimate[config.kl_estimator]


class _Total:
    """A sum over tokens of texts, and what it is divided by."""

    def __init__(self, config: GrpoConfig) -> None:
        self._mode = config.aggregation
        self._constant = config.horizon or config.max_length
        self._sum = 0.0
        self._count = 0.0

    def add(self, tokens: list[float], weight: float) -> None:
        """The tokens of one text."""
        if self._mode == "token-mean":
            self._sum += weight * sum(tokens)
            self._count += weight * len(tokens)
            return
        divisor = {
            "seq-mean-token-mean": len(tokens),
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": self._constant,
        }[self._mode]
        self._sum += weight * sum(tokens) / divisor
        self._count += weight

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0
