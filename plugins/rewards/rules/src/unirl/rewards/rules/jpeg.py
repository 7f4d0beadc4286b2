"""File-size reward: how poorly an image compresses as JPEG.

Source: compressibility and incompressibility of DDPO, arXiv 2305.13301, section 5.1.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import JpegSizeConfig
from .image_input import images_of

__all__ = ["JpegSizeReward", "build"]


def build(config: JpegSizeConfig, *, device: Any) -> JpegSizeReward:
    return JpegSizeReward(config)


class JpegSizeReward:
    """Compresses each image in memory with Pillow's defaults at the given quality."""

    def __init__(self, config: JpegSizeConfig) -> None:
        check_config(config, key="reward.jpeg-size")
        self._quality = config.quality
        self._sign = 1.0 if config.prefer == "large" else -1.0

    def score(self, samples: ScoreInput) -> Scores:
        """Kilobytes of 1000 bytes, negative when small files are preferred."""
        images = images_of(samples, reward="jpeg-size")
        pixels = (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        sizes: list[int] = []
        for image in pixels:
            file = io.BytesIO()
            Image.fromarray(image).save(file, format="JPEG", quality=self._quality)
            sizes.append(file.tell())
        return Scores(values=self._sign * torch.tensor(sizes, dtype=torch.float32) / 1000)

    def close(self) -> None:
        pass
