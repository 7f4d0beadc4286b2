"""Classifier-free guidance: one or two forwards of the velocity, combined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Conditions = Mapping[str, Tensor]
"""Per-row tensors, [B, ...] each."""
Velocity = Callable[[Tensor, Tensor, Conditions], Tensor]
"""velocity(x [B, ...], sigma [B], conditions) -> [B, ...]."""


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Scale and mode of classifier-free guidance."""

    scale: float = 1.0
    """1 turns guidance off: one forward, no negatives."""
    mode: Literal["batched", "two-pass", "norm-corrected"] = "batched"
    """"batched": one forward of 2 B rows, which needs equal shapes.  "two-pass": two forwards of B rows.
    "norm-corrected": two passes, the result rescaled to the norm of the conditional prediction."""
    norm_dims: tuple[int, ...] = (-1,)
    """Dims the norm is taken over in "norm-corrected": the last one, the channels of a packed [B, tokens,
    channels] latent.  Use (1,) for [B, C, H, W] latents."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"guidance: scale = {self.scale}; it must be a finite number >= 0, where 1 is off.")
        if self.mode not in ("batched", "two-pass", "norm-corrected"):
            raise ValueError(f"guidance: mode '{self.mode}' is not known; choose batched, two-pass or norm-corrected.")

    @property
    def is_on(self) -> bool:
        return self.scale != 1.0

    @property
    def num_forwards(self) -> int:
        """Calls of the velocity per evaluation."""
        return 2 if self.is_on and self.mode != "batched" else 1


NO_GUIDANCE = Guidance()


def guided_velocity(
    velocity: Velocity,
    x: Tensor,
    sigma: Tensor,
    *,
    conditions: Conditions,
    negatives: Conditions | None = None,
    guidance: Guidance = NO_GUIDANCE,
) -> Tensor:
    """The velocity to step along: v_neg + scale (v_pos - v_neg).  Returns [B, ...] fp32.

    x: [B, ...].  sigma: [B].  Calls `velocity` exactly `guidance.num_forwards` times; a scale of 1 never
    touches the negatives.

    Raises ValueError if guidance is on without negatives, or if they cannot be batched.
    Source: classifier-free guidance, arXiv 2207.12598; "norm-corrected" as in the Qwen-Image pipeline of
    diffusers.
    """
    if not guidance.is_on:
        return velocity(x, sigma, conditions).float()
    if negatives is None:
        raise ValueError(
            f"guidance: scale = {guidance.scale} needs negatives, found none. Encode negative prompts, or "
            "set the scale to 1."
        )
    if guidance.mode == "batched":
        both = velocity(torch.cat([x, x]), torch.cat([sigma, sigma]), _batched(negatives, conditions))
        negative, positive = both.float().chunk(2)
    else:
        positive = velocity(x, sigma, conditions).float()
        negative = velocity(x, sigma, negatives).float()
    combined = negative + guidance.scale * (positive - negative)
    if guidance.mode == "norm-corrected":
        target, norm = _norm(positive, guidance.norm_dims), _norm(combined, guidance.norm_dims)
        # A combination of norm 0 stays 0, with gradient 0, instead of becoming NaN.
        is_zero = norm == 0
        combined = combined * torch.where(is_zero, 0.0, target / torch.where(is_zero, 1.0, norm))
    return combined


def _batched(negatives: Conditions, conditions: Conditions) -> dict[str, Tensor]:
    if negatives.keys() != conditions.keys():
        raise ValueError(
            f"guidance: conditions have {sorted(conditions)}, negatives have {sorted(negatives)}. "
            "Give both the same keys, or use mode 'two-pass'."
        )
    for key, value in conditions.items():
        if negatives[key].shape != value.shape:
            raise ValueError(
                f"guidance: condition '{key}' has shape {list(value.shape)}, its negative "
                f"{list(negatives[key].shape)}. Pad them to one shape, or use mode 'two-pass'."
            )
    return {key: torch.cat([negatives[key], value]) for key, value in conditions.items()}


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The Euclidean norm over `dims`, which are kept.  At 0, where it has no derivative, its gradient is 0, not NaN."""
    squares = x.square().sum(dim=dims, keepdim=True)
    is_zero = squares == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squares).sqrt())
