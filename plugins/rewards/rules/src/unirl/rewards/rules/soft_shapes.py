"""The shapes reward without thresholds: differentiable, for algorithms that backpropagate rewards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from unirl.core.roles import ScoreInput, Scores

from .config import SoftShapesConfig
from .image_input import images_of
from .metadata_input import indices_of
from .shapes_reading import LIT, MAX_COLOR_DISTANCE, MIN_AREA_PX, MIN_OFFSET_PX, UNIT_AREA, offsets_of
from .shapes_world import COLORS, PLACES, SHAPES, SIZE_PX, signed_distance

__all__ = ["SoftShapesReward", "build"]

_NAME = "soft-shapes"
LIT_WIDTH = 0.05
"""Brightness over which a pixel goes from background to shape, the scale of a sigmoid around `LIT`."""
CHANNEL_WIDTH = 0.02
"""Temperature of the smooth maximum over channels; the maximum itself has no gradient where channels are equal."""
OFFSET_WIDTH_PX = 2.0
"""The same for the distance by which the named place is ahead of the others."""


def build(config: SoftShapesConfig, *, device: Any) -> SoftShapesReward:
    return SoftShapesReward()


class SoftShapesReward:
    """Degrees between 0 and 1 for what `shapes_reading` decides by thresholds."""

    def score(self, samples: ScoreInput) -> Scores:
        """Mean of three degrees, and each of them; the gradient flows into the images.

        color: exp(-(d / 0.4)^2), d the distance of the mean colour to the named one.  place: sigmoid of how far the
        centre lies in the named direction, beyond the others and beyond 6 pixels.  shape: intersection over union with
        the named shape of the same area and centre. All are multiplied by area / 48 px, where that is below 1, so that
        an empty image scores 0.
        """
        images = images_of(samples, reward=_NAME, size_px=(SIZE_PX, SIZE_PX))
        names = {
            key: indices_of(samples, key, known, reward=_NAME)
            for key, known in (("color", tuple(COLORS)), ("shape", SHAPES), ("place", tuple(PLACES)))
        }
        weight = torch.sigmoid((_brightness(images) - LIT) / LIT_WIDTH)
        area = weight.sum(dim=(1, 2))
        axis = torch.arange(SIZE_PX, dtype=images.dtype, device=images.device)
        center_x, center_y = (weight.sum(dim=1) @ axis) / area, (weight.sum(dim=2) @ axis) / area
        there = (area / MIN_AREA_PX).clamp(max=1)
        parts = {
            "color": there * _color(images, weight, names["color"]),
            "shape": there * _shape(weight, axis, center_x, center_y, names["shape"]),
            "place": there * _place(center_x, center_y, names["place"]),
        }
        return Scores(values=torch.stack(list(parts.values())).mean(dim=0), parts=parts)

    def close(self) -> None:
        pass


def _brightness(images: Tensor) -> Tensor:
    """[N, H, W] the largest channel: exact for grey, and less by at most `CHANNEL_WIDTH` log 3."""
    return CHANNEL_WIDTH * (torch.logsumexp(images / CHANNEL_WIDTH, dim=1) - math.log(3))


def _color(images: Tensor, weight: Tensor, named: list[int]) -> Tensor:
    mean = torch.einsum("nchw,nhw->nc", images, weight) / weight.sum(dim=(1, 2))[:, None]
    palette = torch.tensor(list(COLORS.values()), dtype=images.dtype, device=images.device)
    return torch.exp(-(mean - palette[named]).square().sum(dim=1) / MAX_COLOR_DISTANCE**2)


def _place(center_x: Tensor, center_y: Tensor, named: list[int]) -> Tensor:
    offsets = offsets_of(center_x, center_y)
    chosen = torch.nn.functional.one_hot(torch.tensor(named, device=offsets.device), len(PLACES)).bool()
    others = offsets.masked_fill(chosen, MIN_OFFSET_PX).amax(dim=1).clamp(min=MIN_OFFSET_PX)
    return torch.sigmoid((offsets[chosen] - others) / OFFSET_WIDTH_PX)


def _shape(weight: Tensor, axis: Tensor, center_x: Tensor, center_y: Tensor, named: list[int]) -> Tensor:
    dx, dy = axis[None, None, :] - center_x[:, None, None], axis[None, :, None] - center_y[:, None, None]
    area = weight.sum(dim=(1, 2))
    ideal = torch.stack(
        [_ideal(SHAPES[shape], dx=dx[row], dy=dy[row], area=area[row]) for row, shape in enumerate(named)]
    )
    both = (weight * ideal).sum(dim=(1, 2))
    return both / (area + ideal.sum(dim=(1, 2)) - both)


def _ideal(shape: str, *, dx: Tensor, dy: Tensor, area: Tensor) -> Tensor:
    """[H, W] coverage of each pixel by `shape` of this area, anti-aliased as the world is rendered."""
    radius = (area / UNIT_AREA[shape]).sqrt()
    return (0.5 - signed_distance(shape, dx=dx, dy=dy, radius=radius)).clamp(0, 1)
