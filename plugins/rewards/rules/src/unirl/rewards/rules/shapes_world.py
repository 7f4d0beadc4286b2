"""The world of coloured shapes: its words, its captions and its pixels.

One shape in one of four colours at one of four places on a black 64 px canvas: 64 captions. The renderer
makes training images from it; the scorer in `shapes.py` reads it back from pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZE_PX = 64
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
}
SHAPES = ("square", "disk", "cross", "ring")
PLACES: dict[str, str] = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}

RADIUS_PX = (9.0, 13.0)
"""Half the width of a shape, drawn uniformly."""
PLACE_OFFSET_PX = 14.5
"""Distance of a place from the middle of the canvas."""
JITTER_ALONG_PX, JITTER_ACROSS_PX = 2.0, 4.0
CROSS_ARM, RING_HOLE = 1 / 3, 0.6
"""Half width of a cross's arm, and inner radius of a ring, as shares of the radius."""

_MIDDLE = (SIZE_PX - 1) / 2
_DIRECTION = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "top": (0.0, -1.0), "bottom": (0.0, 1.0)}


def in_latin_cube(*indices: int) -> bool:
    """True for one in four of all combinations of attributes with four values each; all indices but one determine the
    last."""
    return sum(indices) % 4 == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Attributes that one caption asks for."""

    color: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.color} {self.shape} {PLACES[self.place]}"

    @property
    def is_held_out(self) -> bool:
        """True for 16 of the 64 scenes, a Latin cube: every pair of attributes still occurs in the other 48."""
        return in_latin_cube(list(COLORS).index(self.color), SHAPES.index(self.shape), list(PLACES).index(self.place))


ALL_SCENES = tuple(
    Scene(color=color, shape=shape, place=place) for color in COLORS for shape in SHAPES for place in PLACES
)


def signed_distance(shape: str, *, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Distance in pixels to the edge of `shape`, negative inside.

    dx, dy: offsets of pixels from the shape's centre.  radius: half the shape's width; all broadcast.
    Exact at edges; outside corners it is the larger of the two axis distances.
    """
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) - radius
    if shape == "cross":
        arm = CROSS_ARM * radius
        upright = torch.maximum(dx.abs() - arm, dy.abs() - radius)
        level = torch.maximum(dx.abs() - radius, dy.abs() - arm)
        return torch.minimum(upright, level)
    # The square root has no derivative at the centre, and 1e-6 pixels from it every shape has the same coverage.
    distance = torch.sqrt((dx * dx + dy * dy).clamp_min(1e-12))
    if shape == "disk":
        return distance - radius
    if shape == "ring":
        return torch.maximum(distance - radius, RING_HOLE * radius - distance)
    raise ValueError(f'shape: "{shape}" is not one of {", ".join(SHAPES)}')


def render(scene: Scene, *, count: int, generator: torch.Generator) -> Tensor:
    """[count, 3, 64, 64] images of one scene in [0, 1], each with its own size and position, anti-aliased."""
    low, high = RADIUS_PX
    radius = low + (high - low) * torch.rand(count, 1, 1, generator=generator)
    jitter = 2 * torch.rand(count, 2, generator=generator) - 1
    along_x, along_y = _DIRECTION[scene.place]
    scale = [JITTER_ALONG_PX if along else JITTER_ACROSS_PX for along in (along_x, along_y)]
    center_x = _MIDDLE + PLACE_OFFSET_PX * along_x + scale[0] * jitter[:, 0]
    center_y = _MIDDLE + PLACE_OFFSET_PX * along_y + scale[1] * jitter[:, 1]
    return draw(scene, center_x=center_x, center_y=center_y, radius=radius)


def draw(scene: Scene, *, center_x: Tensor, center_y: Tensor, radius: Tensor) -> Tensor:
    """[N, 3, 64, 64] images in [0, 1] of the scene's colour and shape, anti-aliased.

    center_x, center_y: [N] pixels from the left and from the top, whatever the scene's place.  radius: [N, 1, 1] px.
    """
    return paint(scene.color, scene.shape, center_x=center_x, center_y=center_y, radius=radius, size_px=SIZE_PX)


def paint(color: str, shape: str, *, center_x: Tensor, center_y: Tensor, radius: Tensor, size_px: int) -> Tensor:
    """[N, 3, size_px, size_px] images in [0, 1] of one shape, as `draw` draws it."""
    axis = torch.arange(size_px, dtype=torch.float32)
    dx = axis[None, None, :] - center_x[:, None, None]
    dy = axis[None, :, None] - center_y[:, None, None]
    coverage = (0.5 - signed_distance(shape, dx=dx, dy=dy, radius=radius)).clamp(0, 1)
    return coverage[:, None] * torch.tensor(COLORS[color])[None, :, None, None]


def place_of(place: str, *, along: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
    """Columns and rows [N] of centres at a place.

    along, across: [N] in [-1, 1], how far from the place's middle, away from the canvas's middle and to its side, in
    units of the world's jitter.
    """
    x, y = _DIRECTION[place]
    outwards, sidewards = PLACE_OFFSET_PX + JITTER_ALONG_PX * along, JITTER_ACROSS_PX * across
    return _MIDDLE + x * outwards - y * sidewards, _MIDDLE + y * outwards + x * sidewards
