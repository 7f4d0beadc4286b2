"""Brightness reward: the simplest reward on which an image model visibly learns."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.roles import ScoreInput, Scores

from .config import BrightnessConfig
from .image_input import images_of

__all__ = ["LUMA", "BrightnessReward", "build"]

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in Rec. 601 luma."""


def build(config: BrightnessConfig, *, device: Any) -> BrightnessReward:
    return BrightnessReward()


class BrightnessReward:
    def score(self, samples: ScoreInput) -> Scores:
        """Mean luma, 0 to 1."""
        images = images_of(samples, reward="brightness").detach()
        channels = images.float().mean(dim=(2, 3))
        return Scores(values=channels @ torch.tensor(LUMA, device=images.device))

    def close(self) -> None:
        pass
