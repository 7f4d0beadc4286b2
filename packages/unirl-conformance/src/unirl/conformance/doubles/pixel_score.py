"""A differentiable score of pixels in closed form, for algorithms that backpropagate rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.core.types.track import Track

__all__ = ["REWARD_WEIGHTS", "PixelScore"]

REWARD_WEIGHTS: Mapping[str, float] = {"one": 0.75, "two": 0.25}
"""Weights of the rewards that algorithms are tested with."""


@dataclass(frozen=True, kw_only=True)
class PixelScore:
    """Weighted sum of two rewards, each a function of one image alone. Implements `unirl.core.roles.GradientScore`."""

    weights: Mapping[str, float]
    """Weights of `one`, the mean square of the pixels, and `two`, the mean sine of five times a pixel."""
    factor: float = 1.0
    """Factor of the whole score."""

    def __call__(self, track: Track, media: Tensor) -> Tensor:
        pixels = media.flatten(1)
        parts = {"one": pixels.square().mean(dim=1), "two": torch.sin(5 * pixels).mean(dim=1)}
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(dim=0)
        return self.factor * torch.where(track.sample_weights.to(total.device) > 0, total, 0.0)
