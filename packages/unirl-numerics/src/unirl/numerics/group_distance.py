"""How far the samples of a group lie from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from unirl.core.types.batch import rows_by_group

__all__ = ["group_distance"]


def group_distance(
    group_ids: Sequence[str], distances: Callable[[Sequence[int]], Tensor], *, to: str = "all"
) -> Tensor:
    """[N] fp32: the distance of each sample to the others of its group; 0 for one that is alone.

    distances: [n, n] of the samples in these rows, symmetric.  to: `all` is the mean over the others, `nearest` the
    least.
    """
    result = torch.zeros(len(group_ids))
    for rows in rows_by_group(group_ids).values():
        if len(rows) > 1:
            pairs = distances(rows).to("cpu", torch.float32)
            itself = torch.eye(len(rows), dtype=torch.bool)
            if to == "nearest":
                result[rows] = pairs.masked_fill(itself, torch.inf).amin(dim=1)
            else:
                result[rows] = pairs.masked_fill(itself, 0.0).sum(dim=1) / (len(rows) - 1)
    return result
