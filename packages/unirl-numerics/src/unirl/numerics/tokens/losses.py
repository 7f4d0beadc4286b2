"""Policy losses of tokens alone, not averaged: see `aggregation`. Those of latents too are in `loss.losses`.

log-probs, ratios: [n, L], padded on the right; `valid` [n, L] marks trained tokens. Other entries may be anything and
get weight 0 later.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..loss.losses import LOG_RATIO_MAX, Surrogate, bounded_ratio, clipped_surrogate, expand_leading

__all__ = ["completion_surrogate", "drpo_loss"]


def completion_surrogate(
    log_ratio: Tensor,
    valid: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """The clipped surrogate of whole completions, with the product of the token ratios as ratio.

    log_ratio: [n, L], new minus old log-probs.  advantages: [n].  Other arguments as in `clipped_surrogate`.
    Each valid token has an equal share of its completion's loss and the gradient of its own log-prob, so the sum over
    tokens has the value and the gradient of -min(A r, A clip(r)) with r = exp(sum_t log r_t).

    Source: REINFORCE leave-one-out with a completion as one action, arXiv 2402.14740; its ratio clipped as in PPO.
    """
    own = torch.where(valid, log_ratio, 0.0)
    whole = own.detach().sum(dim=1, keepdim=True) + own - own.detach()
    result = clipped_surrogate(
        torch.where(valid, whole, 0.0), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    value = result.loss.detach()
    share = value / valid.sum(dim=1, keepdim=True).clamp_min(1)
    return dataclasses.replace(result, loss=result.loss - value + share)


def drpo_loss(log_ratio: Tensor, advantages: Tensor, *, old_log_probs: Tensor | None, delta: float) -> Surrogate:
    """-A r + |A| pi_old (r - 1)^2 / (2 delta): a quadratic penalty in place of a clip.

    log_ratio: [n, L], new minus old log-probs.  advantages: [n] or [n, L].
    old_log_probs: [n, L], of pi_old; None leaves pi_old out, which is SPO.  delta: > 0, larger is a weaker penalty.
    The gradient is -A r w with w = 1 - sign(A (r - 1)) |pi - pi_old| / delta, 1 at r = 1.
    r is `bounded_ratio`; `clipped` and `binding` are where the log-ratio is beyond `LOG_RATIO_MAX`.

    Raises ValueError for delta <= 0, and for advantages whose shape is not a prefix of the log-ratio's.
    Source: DRPO, arXiv 2606.09821.
    """
    if not delta > 0:
        raise ValueError(f"drpo_loss: delta = {delta}; it must be above 0.")
    weight = expand_leading(advantages, log_ratio).detach()
    ratio = bounded_ratio(log_ratio)
    probability = 1.0 if old_log_probs is None else old_log_probs.detach().exp()
    loss = -weight * ratio + weight.abs() * probability * (ratio - 1.0).square() / (2.0 * delta)
    beyond = log_ratio.detach().abs() > LOG_RATIO_MAX
    return Surrogate(loss=loss, ratio=ratio.detach(), clipped=beyond, binding=beyond)
