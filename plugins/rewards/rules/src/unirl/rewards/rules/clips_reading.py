"""Reads colour, shape and motion back from clips of the world of shapes in motion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .clips_world import DIRECTIONS, SIZE_PX
from .shapes_reading import MIN_AREA_PX, NOTHING, read_figures
from .shapes_world import SIZE_PX as IMAGE_SIZE_PX

MIN_CLIP_AREA_PX = MIN_AREA_PX * (SIZE_PX / IMAGE_SIZE_PX) ** 2
"""Fewer lit pixels are not a shape: the same share of the canvas as in an image."""
MIN_CLIP_OVERLAP = 0.6
"""Below that of images, since pixels are coarser: a small ring may overlap by less than 0.7."""
MIN_STEP_PX = 0.5
"""A shape that moves by less from one frame to the next does not move: those of the world move by 1.5 or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipReading:
    """Attributes seen in each of F frames."""

    color: Tensor
    """[F] index into COLORS, or NOTHING."""
    shape: Tensor
    """[F] index into SHAPES, or NOTHING."""
    motion: Tensor
    """[F - 1] index into MOTIONS of the step from each frame to the next, or NOTHING."""


@torch.no_grad()
def read_clip(frames: Tensor) -> ClipReading:
    """Read the attributes of a clip.  frames: [F, 3, 32, 32] in [0, 1].

    A step goes in the direction in which the centre of the lit pixels moves furthest.
    """
    seen = read_figures(frames, min_area_px=MIN_CLIP_AREA_PX, min_overlap=MIN_CLIP_OVERLAP)
    steps = torch.stack([seen.center_x, seen.center_y], dim=1).diff(dim=0)
    length, motion = (steps @ steps.new_tensor(list(DIRECTIONS.values())).T).max(dim=1)
    is_step = (length >= MIN_STEP_PX) & seen.is_there[1:] & seen.is_there[:-1]
    return ClipReading(color=seen.color, shape=seen.shape, motion=torch.where(is_step, motion, NOTHING))
