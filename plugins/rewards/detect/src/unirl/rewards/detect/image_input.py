"""The images of a batch as 8-bit pictures, checked."""

from __future__ import annotations

import torch
from PIL import Image
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput

__all__ = ["pictures_of"]

_SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


def pictures_of(samples: ScoreInput, *, reward: str) -> list[Image.Image]:
    """RGB pictures with the pixels that an image file would have; sizes may differ.

    Raises RewardFailed, naming the sample, when they are missing, of another kind, or leave [0, 1]; NaN counts as
    leaving.
    """
    result: list[Image.Image] = []
    for row, pixels in enumerate(samples.of("image", reward=reward).stored):
        pixels = pixels.detach()
        if pixels.dtype != torch.uint8 and not bool(((pixels >= -_SLACK) & (pixels <= 1 + _SLACK)).all()):
            values = "NaN" if bool(pixels.isnan().any()) else f"{float(pixels.min()):.3g} to {float(pixels.max()):.3g}"
            raise RewardFailed(
                f"reward.{reward}: got pixels of {values} in sample {samples.sample_ids[row]!r}, expected 0 to 1."
            )
        if pixels.dtype != torch.uint8:
            pixels = (pixels.float().clamp(0, 1) * 255).round().byte()
        result.append(Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy()))
    return result
