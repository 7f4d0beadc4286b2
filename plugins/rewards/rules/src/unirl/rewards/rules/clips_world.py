"""The world of shapes in motion: its captions and its clips.

One shape of the world of shapes moves straight across a black 32 px canvas, to one of four sides: 64 captions. The
renderer makes training clips from it; the scorer in `moving_shapes.py` reads it back from pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes_world import COLORS, SHAPES, in_latin_cube, paint

SIZE_PX = 32
NUM_FRAMES = 5
"""1 + 4: a Wan VAE makes two latent frames of them."""
MOTIONS: dict[str, str] = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
"""x to the right, y downwards."""

RADIUS_PX = (5.5, 7.0)
"""Half the width of a shape, drawn uniformly."""
TRAVEL_PX = (12.0, 15.0)
"""Way of the centre from the first frame to the last, around the middle of the canvas, at constant speed."""
JITTER_PX = 4.0
"""Largest distance of the way from the middle of the canvas."""
ONWARD_TRAVEL_PX = (5.0, 6.5)
"""The same for a clip that starts in the middle: the shape stays on the canvas."""
START_JITTER_PX = 1.5
"""Largest distance of its start from the middle of the canvas, in x and in y."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Attributes that one caption asks for."""

    color: str
    shape: str
    motion: str

    @property
    def caption(self) -> str:
        return f"a {self.color} {self.shape} moves {MOTIONS[self.motion]}"

    @property
    def is_held_out(self) -> bool:
        """True for 16 of the 64 clips, a Latin cube: every pair of attributes still occurs in the other 48."""
        return in_latin_cube(list(COLORS).index(self.color), SHAPES.index(self.shape), list(MOTIONS).index(self.motion))


ALL_CLIPS = tuple(
    Clip(color=color, shape=shape, motion=motion) for color in COLORS for shape in SHAPES for motion in MOTIONS
)


def render_clips(clip: Clip, *, count: int, generator: torch.Generator) -> Tensor:
    """[count, 5, 3, 32, 32] clips of one caption in [0, 1], each with its own size, speed and way, anti-aliased."""
    unit = torch.rand(count, 3, 1, generator=generator)
    along = _between(TRAVEL_PX, unit[:, 1]) * (_TIMES - 0.5)
    return _moving(clip, radius=_between(RADIUS_PX, unit[:, 0]), along=along, across=JITTER_PX * (2 * unit[:, 2] - 1))


def render_onward_clips(clip: Clip, *, count: int, generator: torch.Generator) -> Tensor:
    """The same clips with the shape near the middle of the canvas in the first frame, which does not show where it
    goes."""
    unit = torch.rand(count, 4, 1, generator=generator)
    start, across = (START_JITTER_PX * (2 * unit[:, n] - 1) for n in (2, 3))
    along = start + _between(ONWARD_TRAVEL_PX, unit[:, 1]) * _TIMES
    return _moving(clip, radius=_between(RADIUS_PX, unit[:, 0]), along=along, across=across)


_TIMES = torch.arange(NUM_FRAMES) / (NUM_FRAMES - 1)


def _between(range_px: tuple[float, float], unit: Tensor) -> Tensor:
    low, high = range_px
    return low + (high - low) * unit


def _moving(clip: Clip, *, radius: Tensor, along: Tensor, across: Tensor) -> Tensor:
    """[count, 5, 3, 32, 32] frames of a shape whose distance from the middle is `along` [count, 5] in the direction of
    the clip and `across` [count, 1] beside it."""
    x, y = DIRECTIONS[clip.motion]
    middle = (SIZE_PX - 1) / 2
    across = across.expand_as(along)
    frames = paint(
        clip.color,
        clip.shape,
        center_x=(middle + along * x + across * abs(y)).flatten(),
        center_y=(middle + along * y + across * abs(x)).flatten(),
        radius=radius.expand_as(along).flatten()[:, None, None],
        size_px=SIZE_PX,
    )
    return frames.unflatten(0, along.shape)


def draw_frame(*, height: int, width: int, seed: int) -> Tensor:
    """[3, 32, 32] a frame of one of the clips, the next one for the next seed; for conformance, where random pixels are
    no shape."""
    if (height, width) != (SIZE_PX, SIZE_PX):
        raise ValueError(f"size: got {height} x {width}, expected {SIZE_PX} x {SIZE_PX}")
    number, frame = divmod(seed, NUM_FRAMES)
    # 21 = 16 + 4 + 1: from one clip to the next, colour, shape and motion all change.
    clip = ALL_CLIPS[21 * number % len(ALL_CLIPS)]
    return render_clips(clip, count=1, generator=torch.Generator().manual_seed(number))[0, frame]
