"""The critic's value loss and explained variance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .whitening import token_moments

__all__ = ["ValueLoss", "clipped_value_loss", "explained_by_moments", "explained_variance"]


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Elementwise loss of a critic."""

    loss: Tensor
    """With gradient."""
    clipped: Tensor
    """bool. The clipped value determines the loss; outside the range the element has no gradient."""


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip = V_old + clip(V - V_old, +-clip).

    values: any shape, with gradient.  old_values, returns: the same shape.  clip: > 0, in the unit of the returns;
    math.inf turns clipping off.

    Raises ValueError for shapes that differ and for a clip that is not positive.
    Source: the implementation of PPO in OpenAI baselines, https://github.com/openai/baselines (ppo2); PPO's paper,
    arXiv 1707.06347, equation 9, has the square without the clip.
    """
    if not (values.shape == old_values.shape == returns.shape):
        raise ValueError(
            f"clipped_value_loss: values {list(values.shape)}, old_values {list(old_values.shape)}, returns "
            f"{list(returns.shape)}; they must be equal."
        )
    if not clip > 0:
        raise ValueError(f"clipped_value_loss: clip = {clip}; it must be above 0.")
    old_values, returns = old_values.detach(), returns.detach()
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(free, bounded), clipped=(bounded > free).detach())


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) over the valid elements: 1 is a perfect critic, 0 one that predicts the mean.

    values, returns, valid: one shape.  Population variances, in fp64.
    Returns None for constant returns, which have no variance to explain.

    Raises ValueError for shapes that differ.
    """
    if not (values.shape == returns.shape == valid.shape):
        raise ValueError(
            f"explained_variance: values {list(values.shape)}, returns {list(returns.shape)}, valid "
            f"{list(valid.shape)}; they must be equal."
        )
    error = torch.where(valid, returns - values, 0.0)
    return explained_by_moments(errors=token_moments(error, valid), returns=token_moments(returns, valid))


def explained_by_moments(*, errors: Tensor, returns: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) of a batch split over processes.

    errors, returns: `token_moments` of R - V and of R, added up over micro-batches and ranks.
    Returns None for constant returns, which have no variance to explain.
    """
    count = float(returns[0])
    if not count:
        return None
    spreads = [float(squares) / count - (float(total) / count) ** 2 for _, total, squares in (errors, returns)]
    # For equal returns only rounding remains, 1e-7 of the fp32 sums: no variance.
    if spreads[1] <= 1e-12 * (float(returns[2]) + float(errors[2])) / count:
        return None
    return 1.0 - spreads[0] / spreads[1]
