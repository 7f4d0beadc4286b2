"""The differentiable shapes reward: closed forms, agreement with the one that counts, and a gradient that improves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.config import SoftShapesConfig
from unirl.rewards.rules.shapes_reading import read_shapes
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, Scene, render
from unirl.rewards.rules.soft_shapes import build


def score(images: Tensor, *scenes: Scene) -> Scores:
    return build(SoftShapesConfig(), device="cpu").score(
        ScoreInput(
            sample_ids=tuple(str(row) for row in range(len(images))),
            group_ids=("group",) * len(images),
            inputs=Inputs.of_texts([scene.caption for scene in scenes]),
            metadata=tuple({"color": s.color, "shape": s.shape, "place": s.place} for s in scenes),
            media=Media(kind="image", values=images),
        )
    )


def test_an_image_of_one_colour_has_the_degrees_of_the_formulas() -> None:
    """Its mean colour is that colour, and its centre the middle, 6 pixels short of any place."""
    color = torch.tensor([0.9, 0.2, 0.1], dtype=torch.float64)
    image = color.view(1, 3, 1, 1).expand(1, 3, 64, 64)
    parts = score(image, Scene(color="red", shape="square", place="left")).parts
    distance_squared = 0.1**2 + 0.2**2 + 0.1**2
    # fp64; a sum over 4,096 pixels loses at most three digits of 16.
    assert float(parts["color"]) == pytest.approx(math.exp(-distance_squared / 0.4**2), rel=1e-12)
    assert float(parts["place"]) == pytest.approx(1 / (1 + math.exp(3)), rel=1e-9)


def test_a_black_image_scores_nothing() -> None:
    scores = score(torch.zeros(1, 3, 64, 64), ALL_SCENES[0])
    # The area of 4,096 pixels of weight sigmoid(-10) is 0.19, of the 48 that count.
    assert 0 <= float(scores.values) < 0.19 / 48


@pytest.mark.parametrize("scene", ALL_SCENES, ids=lambda scene: scene.caption)
def test_the_right_answer_scores_more_than_any_wrong_one(scene: Scene) -> None:
    images = render(scene, count=4, generator=torch.Generator().manual_seed(0))
    own = score(images, *[scene] * 4).parts
    # Edges are soft in both, so the overlap misses about half a pixel around each shape; no other part loses as much.
    assert all(float(part.min()) > 0.8 for part in own.values())
    wrong = [
        *(("color", Scene(color=color, shape=scene.shape, place=scene.place)) for color in COLORS),
        *(("shape", Scene(color=scene.color, shape=shape, place=scene.place)) for shape in SHAPES),
        *(("place", Scene(color=scene.color, shape=scene.shape, place=place)) for place in PLACES),
    ]
    for name, other in wrong:
        if other != scene:
            parts = score(images, *[other] * 4).parts
            assert bool((parts[name] < own[name] - 0.1).all()), (name, other)


def test_following_the_gradient_turns_a_wrong_image_right() -> None:
    """A dim red disk becomes one that the counting reward reads as green."""
    scene = Scene(color="green", shape="disk", place="left")
    red = Scene(color="red", shape="disk", place="left")
    images = 0.7 * render(red, count=2, generator=torch.Generator().manual_seed(0)) + 0.1
    for _ in range(60):
        images.requires_grad_()
        (gradient,) = torch.autograd.grad(score(images, scene, scene).values.sum(), images)
        images = (images + 0.05 * gradient.sign()).clamp(0, 1).detach()
    seen = read_shapes(images)
    assert seen.color.tolist() == [list(COLORS).index("green")] * 2
    assert float(score(images, scene, scene).values.min()) > 0.8
