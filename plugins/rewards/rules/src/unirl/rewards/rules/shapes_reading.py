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
"""Fewer lit pixels are not a shape: the smallest cross of the world has about 180."""
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
    """Attributes seen in each of N images: indices into COLORS, SHAPES and PLACES, or NOTHING."""

    color: Tensor
    shape: Tensor
    place: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The shape in each of N images, wherever it is."""

    color: Tensor
    """[N] index into COLORS, or NOTHING."""
    shape: Tensor
    """[N] index into SHAPES, or NOTHING."""
    is_there: Tensor
    """[N] bool: enough pixels are lit."""
    center_x: Tensor
    """[N] column of the centre of the lit pixels."""
    center_y: Tensor
    """[N] row of it."""


@torch.no_grad()
def read_shapes(images: Tensor) -> Reading:
    """Read the attributes of images.  images: [N, 3, 64, 64] in [0, 1].  Returns three [N] int64 tensors.

    Each image is read alone, so order and batch size do not matter.
    """
    seen = read_figures(images, min_area_px=MIN_AREA_PX, min_overlap=MIN_OVERLAP)
    place = torch.where(seen.is_there, _place(seen.center_x, seen.center_y), NOTHING)
    return Reading(color=seen.color, shape=seen.shape, place=place)


@torch.no_grad()
def read_figures(images: Tensor, *, min_area_px: float, min_overlap: float) -> Figures:
    """The shape in each of the images [N, 3, S, S] in [0, 1].

    Fewer lit pixels than `min_area_px` are none, and those that overlap with every ideal shape by less than
    `min_overlap` are of no shape.
    """
    lit, area = _lit(images)
    weight = lit.float()
    is_there = area >= min_area_px
    safe_area = area.clamp(min=1)

    mean_color = torch.einsum("nchw,nhw->nc", images.float(), weight) / safe_area[:, None]
    palette = torch.tensor(list(COLORS.values()), device=images.device)
    distance, color = (mean_color[:, None] - palette[None]).norm(dim=-1).min(dim=1)
    color = torch.where(is_there & (distance < MAX_COLOR_DISTANCE), color, NOTHING)

    axis, center_x, center_y = _center(weight, safe_area)
    dx = (axis[None, :] - center_x[:, None]).abs()[:, None, :]
    dy = (axis[None, :] - center_y[:, None]).abs()[:, :, None]
    overlaps = torch.stack([_overlap(s, lit=lit, area=safe_area, dx=dx, dy=dy) for s in SHAPES], dim=1)
    overlap, shape = overlaps.max(dim=1)
    shape = torch.where(is_there & (overlap >= min_overlap), shape, NOTHING)
    return Figures(color=color, shape=shape, is_there=is_there, center_x=center_x, center_y=center_y)


@torch.no_grad()
def shape_region(images: Tensor, *, margin_px: float) -> Tensor:
    """[N, 64, 64] bool: the disk around the centre of the lit pixels in which any shape of their area lies, and
    `margin_px` more.

    Square, disk, cross and ring of area A all lie within sqrt(A / 2) of their centre, to a hundredth.
    """
    lit, area = _lit(images)
    axis, center_x, center_y = _center(lit.float(), area.clamp(min=1))
    radius = (area / 2).sqrt() + margin_px
    distance = (axis[None, None, :] - center_x[:, None, None]) ** 2 + (
        axis[None, :, None] - center_y[:, None, None]
    ) ** 2
    return (distance <= radius[:, None, None] ** 2) & (area > 0)[:, None, None]


def _lit(images: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H, W] bool, pixels of the shape, and [N] their number."""
    lit = images.amax(dim=1) > LIT
    return lit, lit.float().sum(dim=(1, 2))


def _center(weight: Tensor, area: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[S] pixel numbers, and [N] column and row of the centre, of weights [N, S, S]."""
    axis = torch.arange(weight.shape[-1], dtype=torch.float32, device=weight.device)
    return axis, (weight.sum(dim=1) @ axis) / area, (weight.sum(dim=2) @ axis) / area


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
