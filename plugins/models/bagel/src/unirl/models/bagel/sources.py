"""Source images in the sizes that BAGEL's VAE and ViT take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = ["Scale", "pixels"]

_PIXELS = 14 * 14 * 9 * 1024
"""Most pixels of an image."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sides that an image is scaled to, of about its own ratio. Source: `ImageTransform` of the published code."""

    largest: int
    """Longest side, in pixels; a shorter one is kept."""
    least: int
    """Shortest side, where the longest allows it."""
    unit: int
    """Sides are multiples of it."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image of this size, scaled."""
        factor = max(min(self.largest / max(width, height), 1.0), self.least / min(width, height))
        width, height = self._rounded(width, height, factor)
        if width * height > _PIXELS:
            width, height = self._rounded(width, height, _PIXELS / (width * height))
        if max(width, height) > self.largest:
            width, height = self._rounded(width, height, self.largest / max(width, height))
        return width, height

    def scaled(self, image: Image) -> Image:
        from PIL.Image import Resampling

        size = self.size(*image.size)
        return image if size == image.size else image.resize(size, Resampling.BICUBIC)

    def _rounded(self, width: int, height: int, factor: float) -> tuple[int, int]:
        first, second = (
            max(self.unit, round(round(side * factor) / self.unit) * self.unit) for side in (width, height)
        )
        return first, second


def pixels(image: Image) -> Tensor:
    """[1, 3, H, W] fp32 in [-1, 1]."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 127.5 - 1
