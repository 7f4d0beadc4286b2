"""Reads colour, shape and place back from the pixels of the world of shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from unirl.rewards.rules.shapes_world import COLORS, CROSS_ARM, PLACES, RING_HOLE, SHAPES, SIZE_PX

LIT = 0.5
"""A pixel belongs to the shape when its brightest channel is above this."""
MIN_AREA_PX = 48
"""Fewer lit pixels are no shape: the smallest cross of the world has about 180."""
MAX_COLOR_DISTANCE = 0.4
MIN_OFFSET_PX = 6.0
"""A shape nearer to the middle than this is at no place."""
MIN_OVERLAP = 0.7
"""Intersection over union with the ideal shape of the same area and centre."""
NOTHING = -1

UNIT_AREA = {
    "square": 4.0,
    "disk": math.pi,
    "cross": 8 * CROSS_ARM - 4 * CROSS_ARM**2,
    "ring": math.pi * (1 - RING_HOLE**2),
}
"""Area of each shape with radius 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is seen in each of N images: indices into COLORS, SHAPES and PLACES, or NOTHING."""

    color: Tensor
    shape: Tensor
    place: Tensor


@torch.no_grad()
def read_shapes(images: Tensor) -> Reading:
    """What the images show.  images: [N, 3, 64, 64] in [0, 1].  Returns three [N] int64 tensors.

    Each image is read alone, so order and batch size do not matter.
    """
    brightness = images.amax(dim=1)
    lit = brightness > LIT
    weight = lit.float()
    area = weight.sum(dim=(1, 2))
    is_shape = area >= MIN_AREA_PX
    safe_area = area.clamp(min=1)

    mean_color = torch.einsum("nchw,nhw->nc", images.float(), weight) / safe_area[:, None]
    palette = torch.tensor(list(COLORS.values()), device=images.device)
    distance, color = (mean_color[:, None] - palette[None]).norm(dim=-1).min(dim=1)
    color = torch.where(is_shape & (distance < MAX_COLOR_DISTANCE), color, NOTHING)

    axis = torch.arange(SIZE_PX, dtype=torch.float32, device=images.device)
    center_x = (weight.sum(dim=1) @ axis) / safe_area
    center_y = (weight.sum(dim=2) @ axis) / safe_area
    place = torch.where(is_shape, _place(center_x, center_y), NOTHING)

    dx = (axis[None, :] - center_x[:, None]).abs()[:, None, :]
    dy = (axis[None, :] - center_y[:, None]).abs()[:, :, None]
    overlaps = torch.stack([_overlap(s, lit=lit, area=safe_area, dx=dx, dy=dy) for s in SHAPES], dim=1)
    overlap, shape = overlaps.max(dim=1)
    shape = torch.where(is_shape & (overlap >= MIN_OVERLAP), shape, NOTHING)
    return Reading(color=color, shape=shape, place=place)


def _place(center_x: Tensor, center_y: Tensor) -> Tensor:
    """[N] index into PLACES: the direction in which the centre is furthest from the canvas's middle."""
    offset, place = offsets_of(center_x, center_y).max(dim=1)
    return torch.where(offset >= MIN_OFFSET_PX, place, NOTHING)


def offsets_of(center_x: Tensor, center_y: Tensor) -> Tensor:
    """[N, len(PLACES)] pixels from the canvas's middle to the centre, in the direction of each place."""
    middle = (SIZE_PX - 1) / 2
    directions = {
        "left": middle - center_x,
        "right": center_x - middle,
        "top": middle - center_y,
        "bottom": center_y - middle,
    }
    return torch.stack([directions[name] for name in PLACES], dim=1)


def _overlap(shape: str, *, lit: Tensor, area: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """[N] intersection over union of the lit pixels with `shape` of the same area and centre."""
    radius = torch.sqrt(area / UNIT_AREA[shape])[:, None, None]
    if shape == "square":
        ideal = (dx <= radius) & (dy <= radius)
    elif shape == "cross":
        arm = CROSS_ARM * radius
        ideal = ((dx <= arm) & (dy <= radius)) | ((dx <= radius) & (dy <= arm))
    else:
        distance_squared = dx * dx + dy * dy
        ideal = distance_squared <= radius * radius
        if shape == "ring":
            ideal &= distance_squared >= (RING_HOLE * radius) ** 2
    both = (ideal & lit).sum(dim=(1, 2))
    either = (ideal | lit).sum(dim=(1, 2))
    return both / either
