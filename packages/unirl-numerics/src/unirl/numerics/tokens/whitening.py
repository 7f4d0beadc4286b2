"""Whitening over all tokens of a batch, exact over micro-batches and ranks."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["token_moments", "whiten"]


def token_moments(values: Tensor, valid: Tensor) -> Tensor:
    """[3] fp64: count, sum and sum of squares of the valid values. Sum them over micro-batches and ranks.

    values, valid: one shape.
    """
    kept = torch.where(valid, values.detach().double(), 0.0)
    return torch.stack([valid.sum().double(), kept.sum(), kept.square().sum()])


def whiten(
    values: Tensor,
    valid: Tensor,
    *,
    moments: Tensor | None = None,
    center: bool = True,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the valid values, 0 elsewhere; computed in fp64.

    values, valid: one shape.  moments: `token_moments` of the whole batch; None uses these values.
    center: False adds the mean again afterwards.
    ddof: 1 for Bessel's variance, after which the population variance is (count - 1) / count; 0 for the population
    variance.
    Equal values, or a single one, become 0 (their mean without center).

    Raises ValueError for mismatched shapes, and for non-finite values or moments, since one would spread to all.
    """
    if values.shape != valid.shape:
        raise ValueError(f"whiten: values {list(values.shape)}, valid {list(valid.shape)}; they must be equal.")
    moments = (token_moments(values, valid) if moments is None else moments).double().cpu()
    count, total, squares = float(moments[0]), float(moments[1]), float(moments[2])
    if not count:
        return torch.zeros_like(values)
    if not math.isfinite(squares):
        raise ValueError(
            f"whiten: the sum of the {count:.0f} valid values is {total}, of their squares {squares}; expected finite "
            "sums. Look for a non-finite reward, value or log-prob."
        )
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / max(count - ddof, 1.0)
    # Sums of equal values have a rounding error, which is not variance.
    if variance <= 1e-15 * mean * mean:
        variance = 0.0
    scaled = (values.double() - mean) * ((variance + eps) ** -0.5 if variance else 0.0)
    return torch.where(valid, scaled if center else scaled + mean, 0.0).to(values.dtype)
