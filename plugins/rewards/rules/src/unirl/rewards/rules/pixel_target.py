"""Differentiable reward for closeness to a target colour or image, for algorithms that backpropagate rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import PixelTargetConfig
from .image_input import images_of

__all__ = ["PixelTargetReward", "build"]

_NAME = "pixel-target"


def build(config: PixelTargetConfig, *, device: Any) -> PixelTargetReward:
    return PixelTargetReward(config, device=device)


class PixelTargetReward:
    def __init__(self, config: PixelTargetConfig, *, device: Any) -> None:
        check_config(config, key=f"reward.{_NAME}")
        self._target = (_read(config.image) if config.image else _plain(config.color)).to(device)

    def score(self, samples: ScoreInput) -> Scores:
        """Negative mean squared distance per image, in the images' dtype; the gradient flows into the images."""
        images = images_of(samples, reward=_NAME)
        target = self._target.to(images)
        if target.shape[1:] not in ((1, 1), images.shape[2:]):
            raise RewardFailed(
                f"reward.{_NAME}: the target image has {target.shape[1]} x {target.shape[2]} pixels, "
                f"the samples have {images.shape[2]} x {images.shape[3]}; resize the target image."
            )
        return Scores(values=-((images - target) ** 2).mean(dim=(1, 2, 3)))

    def close(self) -> None:
        pass


def _plain(color: list[float]) -> Tensor:
    return torch.tensor(color).view(3, 1, 1)


def _read(file: str) -> Tensor:
    path = Path(file).expanduser()
    if not path.is_file():
        raise RecipeError(f"reward.{_NAME}.image: there is no file {file!r}.")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)
