"""Pictures of the world of shapes, drawn with slices and circles of this file's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
CENTER = {"left": (17, 32), "right": (46, 32), "top": (32, 17), "bottom": (32, 46)}
"""Column and row."""


def _grid(column: int, row: int) -> tuple[Tensor, Tensor]:
    axis = torch.arange(64)
    return axis[None, :] - column, axis[:, None] - row


def _square(column: int, row: int) -> Tensor:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[row - 10 : row + 11, column - 10 : column + 11] = True
    return mask


def _disk(column: int, row: int) -> Tensor:
    dx, dy = _grid(column, row)
    return dx**2 + dy**2 <= 11**2


def _cross(column: int, row: int) -> Tensor:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[row - 12 : row + 13, column - 4 : column + 5] = True
    mask[row - 4 : row + 5, column - 12 : column + 13] = True
    return mask


def _ring(column: int, row: int) -> Tensor:
    dx, dy = _grid(column, row)
    distance = dx**2 + dy**2
    return (distance <= 12**2) & (distance >= 7**2)


DRAW: dict[str, Callable[[int, int], Tensor]] = {
    "square": _square,
    "disk": _disk,
    "cross": _cross,
    "ring": _ring,
}


def draw(color: str, shape: str, place: str) -> Tensor:
    mask = DRAW[shape](*CENTER[place])
    return mask.float()[None] * torch.tensor(RGB[color], dtype=torch.float32)[:, None, None]


ALL = [(color, shape, place) for color in RGB for shape in DRAW for place in CENTER]

STEP = {"left": (-7, 0), "right": (7, 0), "up": (0, -7), "down": (0, 7)}
"""Columns and rows of 64 from one frame to the next."""


def draw_clip(color: str, shape: str, motion: str) -> Tensor:
    """[5, 3, 32, 32]: every frame a picture of 64 pixels, of which each 2 x 2 are averaged."""
    x, y = STEP[motion]
    masks = torch.stack([DRAW[shape](32 + number * x, 32 + number * y) for number in range(-2, 3)])
    small = masks.float().view(5, 32, 2, 32, 2).mean(dim=(2, 4))
    return small[:, None] * torch.tensor(RGB[color], dtype=torch.float32)[:, None, None]


ALL_CLIPS = [(color, shape, motion) for color in RGB for shape in DRAW for motion in STEP]
