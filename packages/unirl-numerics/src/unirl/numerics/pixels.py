"""Pixels that rewards and their encoders read: range, precision, and Pillow's resize with a gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from unirl.core.errors import BatchError, RewardFailed
from unirl.core.types.media import unit_range

if TYPE_CHECKING:
    from unirl.core.roles import ScoreInput

__all__ = ["check_range", "levels", "resize", "widened"]

_SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


def levels(pixels: Tensor) -> Tensor:
    """uint8 levels round(255 x) of pixels x in [0, 1], computed in fp32, ties to even; levels stay as they are.

    The levels of n / 255 are n, so rounding again changes nothing. Raises BatchError for pixels outside [0, 1]; NaN
    counts as outside.
    """
    if pixels.dtype == torch.uint8:
        return pixels
    pixels = pixels.detach().float()
    if pixels.numel() and (bounds := _outside(pixels)):
        raise BatchError(f"pixels: got values from {bounds}, expected 0 to 1, as `decode` of a model gives them.")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def widened(values: Tensor) -> Tensor:
    """In fp32, or fp64 if they are; levels of 8 bits as pixels in [0, 1]."""
    values = unit_range(values)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_range(pixels: Tensor, samples: ScoreInput, row: int, *, reward: str) -> None:
    """Raise RewardFailed, naming the sample in this row, for pixels outside [0, 1]; NaN counts as outside."""
    if pixels.dtype != torch.uint8 and (bounds := _outside(pixels.detach())):
        raise RewardFailed(
            f"reward.{reward}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has "
            f"values from {bounds}; pixels must lie in [0, 1]."
        )


def _outside(pixels: Tensor) -> str:
    """Bounds of pixels that leave [0, 1]; empty for others."""
    low, high = (float(value) for value in torch.stack(pixels.aminmax()))
    # False for NaN as well.
    return "" if low >= -_SLACK and high <= 1 + _SLACK else f"{low:.3g} to {high:.3g}"


def resize(images: Tensor, size_px: tuple[int, int], *, filter: Literal["bilinear", "bicubic"]) -> Tensor:  # noqa: A002
    """[N, C, *size_px] of images [N, C, H, W] in [0, 1], antialiased as `PIL.Image.resize`, each of its two passes
    clipped to [0, 1].

    Pillow also rounds each pass to 8 bits, which has no gradient and is left out.

    The width is first, as in Pillow, but where an image gets wider and lower. Matrix products rather than
    `torch.nn.functional.interpolate`, whose backward pass is not deterministic on a GPU.
    """
    (rows, columns), (height, width) = images.shape[2:], size_px
    if columns < width and rows > height:
        return resize(images.mT, (width, height), filter=filter).mT
    if columns != width:
        images = (images @ _weights(columns, width, filter).to(images).T).clamp(0, 1)
    if rows != height:
        images = (_weights(rows, height, filter).to(images) @ images).clamp(0, 1)
    return images


@lru_cache(maxsize=64)
def _weights(length: int, new: int, filter: str) -> Tensor:  # noqa: A002
    """[new, length] fp64: the weight of every pixel of a line in each of the new ones, rows of sum 1.

    Pillow's filters, spread over `length / new` pixels where a line gets shorter. Bicubic is the cubic convolution with
    a = -0.5 (Keys 1981, equation 15).
    """
    step = length / new
    centers = (torch.arange(new, dtype=torch.float64) + 0.5) * step
    pixels = torch.arange(length, dtype=torch.float64) + 0.5
    x = (pixels - centers[:, None]).abs() / max(step, 1)
    if filter == "bilinear":
        weights = (1 - x).clamp(min=0)
    else:
        near = 1.5 * x**3 - 2.5 * x**2 + 1
        far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        weights = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return weights / weights.sum(dim=1, keepdim=True)
