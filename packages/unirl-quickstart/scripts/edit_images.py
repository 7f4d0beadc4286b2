"""Edits of shapes with their source images, for the editing quickstart."""

from __future__ import annotations

import torch
from checkpoint_files import to_levels
from torch import Tensor
from unirl.rewards.rules.edits_world import ALL_EDITS, Edit
from unirl.rewards.rules.shapes_world import ALL_SCENES, RADIUS_PX, draw, place_of, render

__all__ = ["IMAGES_PER_SCENE", "Case", "draw_all", "draw_splits", "is_seen"]

IMAGES_PER_SCENE = {"train": 2, "heldout": 3}
"""For each of the 48 and 16 scenes. The 6 and 9 edits of a scene take its images in turn."""

Case = tuple[Edit, Tensor]
"""An edit and its source image [3, 64, 64], in levels of 8 bits."""


def is_held_out(edit: Edit) -> bool:
    """Whether the edit starts from one of the 16 held-out scenes."""
    return edit.source.is_held_out


def is_seen(edit: Edit) -> bool:
    """Whether the edit is in training: no held-out scene occurs there, neither before an edit nor after it."""
    return not (edit.source.is_held_out or edit.target.is_held_out)


def draw_splits(*, seed: int) -> dict[str, list[Case]]:
    """`train`, 288 edits of 96 images, and `heldout`, 144 of 48."""
    generator = torch.Generator().manual_seed(seed)
    splits: dict[str, list[Case]] = {"train": [], "heldout": []}
    for scene in ALL_SCENES:
        split, is_in = ("heldout", is_held_out) if scene.is_held_out else ("train", is_seen)
        count = IMAGES_PER_SCENE[split]
        images = to_levels(render(scene, count=count, generator=generator))
        edits = [edit for edit in ALL_EDITS if edit.source == scene and is_in(edit)]
        splits[split] += [(edit, images[number % count]) for number, edit in enumerate(edits)]
    return splits


def draw_all(*, count: int, generator: torch.Generator) -> Tensor:
    """[64, count, 3, 64, 64] images of all scenes. Those of one number have the same size and the same jitter, so that
    any two scenes that differ in one attribute are an image before and after an edit."""
    low, high = RADIUS_PX
    radius = low + (high - low) * torch.rand(count, 1, 1, generator=generator)
    along, across = 2 * torch.rand(2, count, generator=generator) - 1
    centers = [place_of(scene.place, along=along, across=across) for scene in ALL_SCENES]
    return torch.stack(
        [draw(scene, center_x=x, center_y=y, radius=radius) for scene, (x, y) in zip(ALL_SCENES, centers, strict=True)]
    )
