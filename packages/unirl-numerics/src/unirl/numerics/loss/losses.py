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
    """bool.  The ratio is outside [1 - clip_low, 1 + clip_high], or the divergence beyond its threshold; its mean is
    the clip fraction that papers plot."""
    binding: Tensor
    """bool.  The clip, the dual clip, the mask or the bound of the log-ratio decides the loss, so the element has no
    gradient. An element that moved against its advantage may be `clipped` but keeps its gradient."""


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
    clip_low: 1 means no lower bound, since no ratio is below 0.
    dual_clip: where A < 0, the loss is at most -A dual_clip; > 1.
    r is `bounded_ratio`: beyond +-`LOG_RATIO_MAX` an element has no gradient, whatever its advantage.

    Raises ValueError for invalid ranges and for advantages that are not the leading dims of the log-ratio.
    Source: PPO, arXiv 1707.06347, equation 7; two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv
    1912.09729.
    """
    _check_clip("clipped_surrogate", clip_low, clip_high)
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


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, and all keep their gradient.

    log_probs: [n, L] of tokens or steps, with gradient.  old_log_probs: [n, L].  advantages: [n] or [n, L].
    clip_low: 1 means no lower bound, as in the paper.  r is `bounded_ratio`.
    `binding` is False throughout.

    Raises ValueError for invalid ranges, and for advantages whose shape is not a prefix of the log-probs'.
    Source: CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    _check_clip("cispo_loss", clip_low, clip_high)
    ratio = bounded_ratio((log_probs - old_log_probs).detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * expand_leading(advantages, log_probs).detach() * log_probs
    return Surrogate(loss=loss, ratio=ratio, clipped=weight != ratio, binding=torch.zeros_like(ratio, dtype=torch.bool))


def _check_clip(name: str, low: float, high: float) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"{name}: clip_low = {low}, clip_high = {high}; 0 <= clip_low <= 1 and clip_high >= 0 are needed."
        )


def divergence_surrogate(log_ratio: Tensor, advantages: Tensor, *, divergence: Tensor, threshold: float) -> Surrogate:
    """-A r without the elements that have moved away from the old policy and still do: a mask in place of a clip.

    log_ratio: [n, L], new minus old log-probs.  advantages: [n] or [n, L].
    divergence: [n, L] of the new from the old policy, such as `gaussian_kl`; it gets no gradient.
    threshold: > 0; infinity is the importance-weighted policy gradient.
    An element is dropped, to a loss of 0, iff divergence >= threshold and the loss pushes it further away: A > 0 and
    r > 1, or A < 0 and r < 1. It counts in a mean all the same.
    r is `bounded_ratio`. `clipped` is where the divergence is at the threshold or beyond; `binding` where the element
    has no gradient.

    Raises ValueError for a threshold that is not above 0, and for shapes that do not fit.
    Source: Flow-DPPO, arXiv 2606.11025.
    """
    if not threshold > 0:
        raise ValueError(f"divergence_surrogate: threshold = {threshold}; it must be above 0.")
    if divergence.shape != log_ratio.shape:
        raise ValueError(
            f"divergence_surrogate: shapes {list(divergence.shape)} of the divergence and {list(log_ratio.shape)} of "
            "the log-ratio must be equal."
        )
    weight = expand_leading(advantages, log_ratio).detach()
    ratio = bounded_ratio(log_ratio)
    is_far = divergence.detach() >= threshold
    is_dropped = is_far & (((weight > 0) & (ratio > 1.0)) | ((weight < 0) & (ratio < 1.0)))
    loss = torch.where(is_dropped, 0.0, -weight * ratio)
    binding = is_dropped | (log_ratio.detach().abs() > LOG_RATIO_MAX)
    return Surrogate(loss=loss, ratio=ratio.detach(), clipped=is_far, binding=binding)


def sequence_log_ratio(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """The mean log-ratio of each sample at each of its tokens or steps, with the gradient of that one's log-prob.

    log_ratio: [n, L], new minus old log-probs.  valid: [n, L] bool.  Returns [n, L] for `clipped_surrogate`; 0 where
    not valid.
    Value: sg(mean_t log r_t) + log r_t - sg(log r_t). Advantages may differ by token; if they do not, the mean loss
    over tokens has the value and gradient of the sequence form, exp(mean_t log r_t).
    Source: GSPO, arXiv 2507.18071, equations 7 and 14.
    """
    own = torch.where(valid, log_ratio, 0.0)
    mean = own.detach().sum(dim=1) / valid.sum(dim=1).clamp_min(1)
    return torch.where(valid, mean[:, None] + own - own.detach(), 0.0)


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


def velocity_kl(mean: Tensor, reference_mean: Tensor, on_velocity: Tensor, *, batch_dims: int = 2) -> Tensor:
    """mean((v - v_ref)^2) of two velocities, from the means of the step that they make: mean(shift^2) / on_velocity^2.

    on_velocity: [n, S], the factor of the velocity in the mean, not 0, see `kernels.Coefficients`.  Other shapes and
    the result as in `gaussian_kl`. Needs no forward besides the replay. For 'ddim-eta' v is the model's prediction.
    Source: the penalty of DiffusionNFT, arXiv 2509.16117, and, with the noise as prediction, of DPOK's code,
    arXiv 2305.16381.
    """
    shift = mean_shift_squared(mean, reference_mean, batch_dims=batch_dims)
    return shift / on_velocity.reshape(shift.shape).square()


def expand_leading(advantages: Tensor, like: Tensor) -> Tensor:
    """[n] or [n, S] -> as many dims as `like`, so that each value reaches all elements it leads."""
    if advantages.shape != like.shape[: advantages.ndim]:
        raise ValueError(
            f"policy loss: advantages have shape {list(advantages.shape)}, the log-ratio {list(like.shape)}; the first "
            "must be the leading dims of the second."
        )
    return advantages.view(*advantages.shape, *(1,) * (like.ndim - advantages.ndim))
