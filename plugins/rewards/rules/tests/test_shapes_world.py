from __future__ import annotations

from itertools import combinations

import torch
from unirl.rewards.rules.shapes_reading import read_shapes
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, render


def test_the_world_has_64_captions_and_16_are_held_out() -> None:
    assert len({scene.caption for scene in ALL_SCENES}) == 64
    assert sum(scene.is_held_out for scene in ALL_SCENES) == 16
    assert "a red ring on the left" in {scene.caption for scene in ALL_SCENES}


def test_every_pair_of_attributes_occurs_in_both_splits() -> None:
    for first, second in combinations(("color", "shape", "place"), 2):
        for held_out in (False, True):
            scenes = [scene for scene in ALL_SCENES if scene.is_held_out is held_out]
            assert len({(getattr(s, first), getattr(s, second)) for s in scenes}) == 16


def test_rendered_images_read_as_what_they_show() -> None:
    generator = torch.Generator().manual_seed(0)
    for scene in ALL_SCENES:
        seen = read_shapes(render(scene, count=20, generator=generator))
        assert seen.color.tolist() == [list(COLORS).index(scene.color)] * 20
        assert seen.shape.tolist() == [SHAPES.index(scene.shape)] * 20
        assert seen.place.tolist() == [list(PLACES).index(scene.place)] * 20


def test_rendering_is_a_function_of_the_generator() -> None:
    first, second = (render(ALL_SCENES[9], count=3, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.equal(second)
    assert not first[0].equal(first[1])
