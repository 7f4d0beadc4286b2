"""Metrics shared by policy losses over tokens and over SDE steps."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.core.roles import Metric

__all__ = ["mean_over", "ratio_metrics"]


def ratio_metrics(ratio: Tensor, clipped: Tensor, log_ratio: Tensor, counted: Tensor) -> dict[str, Metric]:
    """Mean of the ratio, its largest distance from 1, the fraction clipped, and k2 of the old and the new policy.

    All [n, S] over tokens or SDE steps; counted: the weight of each.
    """
    deviation = torch.where(counted > 0, (ratio - 1).abs(), 0.0)
    return {
        "ratio_mean": mean_over(ratio, counted),
        "ratio_max_dev": Metric(total=deviation.max() if deviation.numel() else 0.0, reduce="max"),
        "clip_fraction": mean_over(clipped.float(), counted),
        "approx_kl": mean_over(0.5 * log_ratio.square(), counted),
    }


def mean_over(values: Tensor, weights: Tensor) -> Metric:
    """Weighted mean that adds up over micro-batches and ranks; values at weight 0 may be NaN."""
    kept = torch.where(weights > 0, values.detach() * weights, 0.0)
    return Metric(total=kept.double().sum(), weight=weights.detach().double().sum())
