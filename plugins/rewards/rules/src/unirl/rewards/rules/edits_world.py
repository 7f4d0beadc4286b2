"""Edits in the world of shapes: one of a picture's three attributes changes, everything else stays.

64 pictures, and for each the three other values of every attribute: 576 edits by 44 instructions. An instruction names
the source's shape and the new value alone, so that the rest can be read from the source image only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, SIZE_PX, Scene, render

Attribute = Literal["color", "shape", "place"]
ATTRIBUTES: tuple[Attribute, ...] = get_args(Attribute)
VALUES: dict[Attribute, tuple[str, ...]] = {"color": tuple(COLORS), "shape": SHAPES, "place": tuple(PLACES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One attribute of a source picture, and the value that it is to have."""

    source: Scene
    attribute: Attribute
    value: str

    @property
    def target(self) -> Scene:
        """The picture after the edit."""
        return dataclasses.replace(self.source, **{self.attribute: self.value})

    @property
    def instruction(self) -> str:
        """The edit in words."""
        shape = self.source.shape
        if self.attribute == "color":
            return f"make the {shape} {self.value}"
        if self.attribute == "shape":
            return f"turn the {shape} into a {self.value}"
        return f"move the {shape} to the {self.value}"


ALL_EDITS = tuple(
    Edit(source=scene, attribute=attribute, value=value)
    for scene in ALL_SCENES
    for attribute in ATTRIBUTES
    for value in VALUES[attribute]
    if value != getattr(scene, attribute)
)


def draw_any(*, height: int, width: int, seed: int) -> Tensor:
    """[3, 64, 64] an image of one of the scenes; for conformance, where random pixels are not an edit of anything."""
    if (height, width) != (SIZE_PX, SIZE_PX):
        raise ValueError(f"size: got {height} x {width}, expected {SIZE_PX} x {SIZE_PX}")
    # 21 = 16 + 4 + 1: from one number to the next, colour, shape and place all change.
    scene = ALL_SCENES[21 * seed % len(ALL_SCENES)]
    return render(scene, count=1, generator=torch.Generator().manual_seed(seed))[0]
