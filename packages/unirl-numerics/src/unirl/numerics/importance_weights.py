"""Weights that correct for samples of another policy: the engine's arithmetic, or weights of some updates ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from unirl.core.roles import Metric

from .losses import LOG_RATIO_MAX

__all__ = ["ImportanceLevel", "ImportanceWeights", "truncated_importance_weights"]

ImportanceLevel = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Factors of the loss, and what was cut off them."""

    weights: Tensor
    """[n, L] fp32, at most the cap, without gradient; 1 where not valid."""
    ratios: Tensor
    """[R] the valid tokens' ratios, or those of the sequences with a valid token, before the cap."""
    cap: float
    """What the weights are at most."""

    @property
    def capped(self) -> Tensor:
        """[R] bool, the ratio is above the cap."""
        return self.ratios > self.cap

    def metrics(self) -> dict[str, Metric]:
        """Mean ratio, its largest, the mean of what the cap took away, and the fraction that it took from."""
        weight = float(self.ratios.numel())
        return {
            "importance_ratio": Metric(total=float(self.ratios.sum()), weight=weight),
            "importance_ratio_max": Metric(
                total=float(self.ratios.max()) if weight else 0.0, weight=weight, reduce="max"
            ),
            "importance_cut": Metric(total=float((self.ratios - self.cap).clamp_min(0).sum()), weight=weight),
            "importance_capped": Metric(total=float(self.capped.sum()), weight=weight),
        }


def truncated_importance_weights(
    log_probs: Tensor, sampler_log_probs: Tensor, valid: Tensor, *, cap: float, level: ImportanceLevel = "token"
) -> ImportanceWeights:
    """min(pi_old / pi_sampler, cap), a constant for the gradient.

    log_probs: [n, L] of the tokens under the weights that the loss takes for old, from the model that trains.
    sampler_log_probs: [n, L], as the engine gave them.  valid: [n, L] bool.  cap: > 0, often 2 or more.
    level: "token" weighs each token by its own ratio; "sequence" all tokens of a row by the product over the row,
    which is unbiased without the cap and far more variable.
    Log-ratios are clamped to +-`LOG_RATIO_MAX`.

    Raises ValueError for a cap that is not positive and for an unknown level.
    Source: truncated importance sampling, Ionides, J. Comput. Graph. Stat. 17 (2008), weights of section 2; for the gap
    between an engine and a trainer: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025).
    """
    if not cap > 0:
        raise ValueError(f"truncated_importance_weights: cap = {cap}; it must be above 0.")
    log_ratio = torch.where(valid, (log_probs - sampler_log_probs).detach().float(), 0.0)
    if level == "token":
        counted = valid
    elif level == "sequence":
        log_ratio, counted = log_ratio.sum(dim=1, keepdim=True), valid.any(dim=1, keepdim=True)
    else:
        raise ValueError(f"truncated_importance_weights: level '{level}' is not known; known are token, sequence.")
    ratio = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    weights = torch.where(valid, ratio.clamp_max(cap), 1.0)
    return ImportanceWeights(weights=weights, ratios=ratio[counted], cap=cap)
