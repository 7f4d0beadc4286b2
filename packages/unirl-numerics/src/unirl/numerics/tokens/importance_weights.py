"""Importance weights for off-policy samples, from an engine with other numerics or from older weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from unirl.core.roles import Metric

from ..loss.losses import bounded_ratio

__all__ = ["ImportanceLevel", "ImportanceWeights", "truncated_importance_weights"]

ImportanceLevel = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Per-token weights of the loss, and the ratios before truncation."""

    weights: Tensor
    """[n, L] fp32, at most the cap, without gradient; 1 where not valid."""
    ratios: Tensor
    """[R], ratios of the valid tokens, or of the sequences with a valid token, before the cap."""
    cap: float
    """Upper bound of the weights."""

    @property
    def capped(self) -> Tensor:
        """[R] bool, the ratio is above the cap."""
        return self.ratios > self.cap

    def metrics(self) -> dict[str, Metric]:
        """Mean and largest ratio, mean excess over the cap, and fraction capped."""
        weight = float(self.ratios.numel())
        return {
            "importance_ratio": Metric(total=self.ratios.sum(), weight=weight),
            "importance_ratio_max": Metric(total=self.ratios.max() if weight else 0.0, weight=weight, reduce="max"),
            "importance_cut": Metric(total=(self.ratios - self.cap).clamp_min(0).sum(), weight=weight),
            "importance_capped": Metric(total=self.capped.sum(), weight=weight),
        }


def truncated_importance_weights(
    log_probs: Tensor, sampler_log_probs: Tensor, valid: Tensor, *, cap: float, level: ImportanceLevel = "token"
) -> ImportanceWeights:
    """min(pi_old / pi_sampler, cap), a constant for the gradient.

    log_probs: [n, L] of the tokens under the old policy, computed by the trainer.
    sampler_log_probs: [n, L], from the engine.  valid: [n, L] bool.  cap: > 0, often 2 or more.
    level: "token" weights each token by its own ratio; "sequence" all tokens of a row by the product over the row,
    which is unbiased without the cap but has a far higher variance.
    Ratios are `bounded_ratio`s.

    Raises ValueError for a cap that is not positive and for an unknown level.
    Source: truncated importance sampling, Ionides, J. Comput. Graph. Stat. 17 (2008), weights of section 2; for the
    mismatch between an engine and a trainer: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
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
        raise ValueError(f"truncated_importance_weights: level '{level}' is not known; choose token or sequence.")
    ratio = bounded_ratio(log_ratio)
    weights = torch.where(valid, ratio.clamp_max(cap), 1.0)
    return ImportanceWeights(weights=weights, ratios=ratio[counted], cap=cap)
