"""Samples whose rewards disagree about them, for a KL penalty on these alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from unirl.core.types.batch import rows_by_group

from .rank_values import rank_values

__all__ = ["most_uncertain"]


def most_uncertain(
    combined: Tensor,
    parts: Sequence[Tensor],
    *,
    share: float,
    group_ids: Sequence[str],
    sample_ids: Sequence[str],
    weights: Tensor,
) -> Tensor:
    """[N] fp32: 1 for the `share` of the samples of each group with the highest uncertainty, 0 for the others.

    combined: [N], the reward that is trained on.  parts: one or more [N], every reward by itself, higher is better; NaN
    where a sample has no score.
    share: in (0, 1]; ceil(share n) of the n samples of a group. Among equally uncertain ones the higher ids are taken.
    weights: [N]; rows of weight 0 take no part and get 0.

    The uncertainty is U_i = w(combined)_i - mean over the parts of w(part)_i, with the win rate w in the group of
    `rank_values`: high where the reward that is trained on ranks a sample above its place by the others. A sample
    without a score has the mean win rate, 1/2. Of K parts, the one that is `combined` itself multiplies every U by
    (K - 1) / K, so with one trained reward the order is that of the paper, which leaves it out.

    Source: GARDO, arXiv 2512.24138, equation 7 and algorithm 1. There a tie is no win, and the share follows the mean
    uncertainty of the last 20 epochs, which is 0 where ties count half.
    """
    counted = [row for row in range(len(sample_ids)) if float(weights[row]) > 0]
    groups = list(rows_by_group([group_ids[row] for row in counted]).values())
    group = np.empty(len(counted), dtype=np.int64)
    for number, places in enumerate(groups):
        group[places] = number

    def win_rates(scores: Tensor) -> NDArray[np.float64]:
        values = scores.detach().double().cpu().numpy()[counted]
        rates, scored = np.full(len(values), 0.5), ~np.isnan(values)
        rates[scored] = rank_values(values[scored], group[scored], kind="win-rate")
        return rates

    # Rounded, so that ids decide among equal ones: those that differ do so by far more.
    uncertainty = (win_rates(combined) - np.mean([win_rates(part) for part in parts], axis=0)).round(9)
    result = [0.0] * len(sample_ids)
    for places in groups:
        ranked = sorted(places, key=lambda place: (uncertainty[place], sample_ids[counted[place]]))
        # The product of share and n may be an integer but for rounding.
        count = math.ceil(share * len(ranked) - 1e-9)
        for place in ranked[len(ranked) - count :]:
            result[counted[place]] = 1.0
    return torch.tensor(result, dtype=torch.float32, device=weights.device)
