"""Per-element policy losses and KL terms.  Nothing here averages over samples: `reduction` does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ClipSchedule = Literal["constant", "linear", "cosine"]

LOG_RATIO_MAX = 20.0
"""Log-ratios beyond it, a factor of 5e8, are clamped before every exponential and get no gradient: in fp32 exp is
infinite from 88.8 on, and 0 times infinity is NaN, at advantage 0 and weight 0 too."""


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The clipped policy loss, element by element, with the shape of the log-ratio."""

    loss: Tensor
    """With gradient."""
    ratio: Tensor
    """`bounded_ratio` of the log-ratio, detached."""
    clipped: Tensor
    """bool.  The ratio is outside [1 - clip_low, 1 + clip_high]; its mean is the clip fraction that papers
    plot."""
    binding: Tensor
    """bool.  The clip, the dual clip or the bound of the log-ratio decides the loss, so the element has no gradient.
    A subset of `clipped`: a ratio that moved against its advantage is outside the range but keeps its gradient."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with the log-ratio clamped to +-`LOG_RATIO_MAX`: finite, and with no gradient beyond.

    log_ratio: any shape; an infinite one is clamped as well.  Same shape and dtype.
    """
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), to be minimised.

    log_ratio: [n, ...], new minus old log-prob.  advantages: [n] or any leading dims of it.
    dual_clip: where A < 0, the loss is at most -A dual_clip; > 1.
    r is `bounded_ratio`: beyond +-`LOG_RATIO_MAX` an element has no gradient, whatever its advantage.

    Raises ValueError for invalid ranges and for advantages that are not the leading dims of the log-ratio.
    Source: PPO, arXiv 1707.06347, equation 7; two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv
    1912.09729.
    """
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ValueError(
            f"clipped_surrogate: clip_low = {clip_low}, clip_high = {clip_high}; 0 <= clip_low < 1 and "
            "clip_high >= 0 are needed."
        )
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(
            f"clipped_surrogate: dual_clip = {dual_clip} must be larger than 1 + clip_high = {1 + clip_high}."
        )
    weight = expand_leading(advantages, log_ratio).detach()
    ratio = bounded_ratio(log_ratio)
    free = -weight * ratio
    bounded = -weight * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    is_above, is_below = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    binding = (is_above & (weight > 0)) | (is_below & (weight < 0)) | (log_ratio.detach().abs() > LOG_RATIO_MAX)
    if dual_clip is not None:
        is_capped = (weight < 0) & (ratio > dual_clip)
        loss = torch.where(is_capped, -weight * dual_clip, loss)
        binding = binding | is_capped
    return Surrogate(loss=loss, ratio=ratio.detach(), clipped=is_above | is_below, binding=binding)


def clip_schedule(name: ClipSchedule, value: float, progress: float) -> float:
    """The clip range at this point of the training.  progress: 0 at the start, 1 at the end.

    "constant" keeps `value`; "linear" falls to half of it; "cosine" falls to 0 as value (1 + cos(pi p)) / 2.
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"clip_schedule: progress = {progress}; it must lie in [0, 1].")
    if name == "constant":
        return value
    if name == "linear":
        return value * (1.0 - 0.5 * progress)
    if name == "cosine":
        return value * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"clip_schedule: '{name}' is not known; known are constant, linear, cosine.")


def ratio_norm(log_ratio: Tensor, *, mean_shift_sq: Tensor, std: Tensor) -> Tensor:
    """The log-ratio without its negative bias, on the scale of the step's noise: (log r + shift^2 / (2 s^2))
    s.

    log_ratio: [n, S], of element-averaged log-probs.  mean_shift_sq: [n, S], from `mean_shift_squared` of the
    new and the old means.  std: [n, S], or [n, S, 1, ...] as replay gives it.
    Under the old policy the result has mean 0: it is mean(shift * noise).
    Source: GRPO-Guard, arXiv 2510.22319, RatioNorm.
    """
    s = std.reshape(log_ratio.shape)
    return (log_ratio + mean_shift_sq / (2.0 * s.square())) * s


def mean_shift_squared(mean: Tensor, other: Tensor, *, batch_dims: int = 2) -> Tensor:
    """The squared distance of two means, averaged over all but the first `batch_dims` dims.

    mean, other: [n, S, ...] as replay gives them (batch_dims 2), or [B, ...] (batch_dims 1).
    """
    if mean.shape != other.shape:
        raise ValueError(f"mean_shift_squared: shapes {list(mean.shape)} and {list(other.shape)} must be equal.")
    return (mean - other).square().flatten(batch_dims).mean(dim=batch_dims)


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor, *, batch_dims: int = 2) -> Tensor:
    """KL divergence per element of two transitions of equal std s: mean(shift^2) / (2 s^2).

    mean, reference_mean: [n, S, ...].  std: [n, S, 1, ...] or [n, S].  Returns [n, S].  Transitions of one
    step, [B, ...] and [B, 1, ...], take batch_dims 1.
    Equals (-dt) / 2 (g (1 - sigma) / (2 sigma) + 1 / g)^2 mean((v - v_ref)^2) for Flow-SDE, the form of
    Flow-GRPO, arXiv 2505.05470.
    """
    shift = mean_shift_squared(mean, reference_mean, batch_dims=batch_dims)
    return shift / (2.0 * std.reshape(shift.shape).square())


def flow_grpo_kl(mean: Tensor, reference_mean: Tensor, g: Tensor, *, batch_dims: int = 2) -> Tensor:
    """The KL term as flow_grpo's code has it: mean(shift^2) / (2 g^2), which leaves out the step's length.

    It is (-dt) times `gaussian_kl`, so its weight means something else at every number of steps.  Only to
    reproduce numbers published with that code.  Shapes as in `gaussian_kl`; g from the transition.
    Source: https://github.com/yifan123/flow_grpo.
    """
    return gaussian_kl(mean, reference_mean, g, batch_dims=batch_dims)


def expand_leading(advantages: Tensor, like: Tensor) -> Tensor:
    """[n] or [n, S] -> as many dims as `like`, so that each value reaches all elements it leads."""
    if advantages.shape != like.shape[: advantages.ndim]:
        raise ValueError(
            f"policy loss: advantages have shape {list(advantages.shape)}, the log-ratio {list(like.shape)}; the first "
            "must be the leading dims of the second."
        )
    return advantages.view(*advantages.shape, *(1,) * (like.ndim - advantages.ndim))
