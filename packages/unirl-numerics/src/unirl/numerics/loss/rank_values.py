"""Rewards replaced by the ranks of their scores within the group: win rates and normal scores."""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["RewardValues", "rank_values"]

RewardValues = Literal["scores", "win-rate", "normal-scores"]
_NORMAL = NormalDist()


def rank_values(scores: NDArray[np.float64], group: NDArray[np.int64], *, kind: RewardValues) -> NDArray[np.float64]:
    """Values to compute advantages from, in place of the scores.

    scores: [n], finite.  group: [n], the index of each score's group, from 0.
    "scores": as they are.
    "win-rate": (number of lower scores + half of the equal ones) / (G - 1) over the other G - 1 of the group: the share
    of pairwise comparisons won. A group of one gets 1/2, and so does the mean of every group.
    "normal-scores": the standard normal quantile of rank / (G + 1), with the mean rank of ties; the middle is 0.
    Both depend on the order of the scores alone, so a strictly increasing map of the scores changes nothing, and equal
    scores stay equal.

    Raises ValueError for an unknown kind.
    Source: win rates Pref-GRPO, arXiv 2508.20751; normal scores B. L. van der Waerden, "Order tests for the two-sample
    problem and their power" (1952).
    """
    if kind == "scores":
        return scores
    if kind not in ("win-rate", "normal-scores"):
        raise ValueError(f"advantages: values '{kind}' is not known; known are scores, win-rate, normal-scores.")
    result = np.empty(len(scores))
    # Groups are slices of a stable sort, so that many small groups cost no search each.
    order = np.argsort(group, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(group))[:-1]):
        _, place, counts = np.unique(scores[rows], return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - counts + (counts + 1) / 2)[place]
        if kind == "win-rate":
            result[rows] = (rank - 1) / (len(rows) - 1) if len(rows) > 1 else 0.5
        else:
            result[rows] = [_NORMAL.inv_cdf(share) for share in (rank / (len(rows) + 1)).tolist()]
    return result
