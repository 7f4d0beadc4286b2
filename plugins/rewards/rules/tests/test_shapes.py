"""The shapes reward on images drawn by hand."""

from __future__ import annotations

import pytest
import torch
from hand_drawn_shapes import ALL, CENTER, DRAW, RGB, draw
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.config import ShapesConfig
from unirl.rewards.rules.shapes import build

IMAGES = torch.stack([draw(*triple) for triple in ALL])


def wanting(triples: list[tuple[str, str, str]], images: Tensor | None) -> ScoreInput:
    names = [f"s{index}" for index in range(len(triples))]
    return ScoreInput(
        sample_ids=tuple(names),
        group_ids=tuple(names),
        inputs=Inputs.of_texts([" ".join(triple) for triple in triples]),
        metadata=tuple(dict(zip(("color", "shape", "place"), triple, strict=True)) for triple in triples),
        media=None if images is None else Media(kind="image", values=images),
    )


def score(triples: list[tuple[str, str, str]], images: Tensor | None) -> Scores:
    return build(ShapesConfig(), device="cpu").score(wanting(triples, images))


def test_every_color_shape_and_place_scores_one() -> None:
    scores = score(ALL, IMAGES)
    assert scores.values.tolist() == [1.0] * 64
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        name: [1.0] * 64 for name in ("color", "shape", "place", "perfect")
    }


def _next(names: dict, name: str) -> str:
    order = list(names)
    return order[(order.index(name) + 1) % len(order)]


@pytest.mark.parametrize("wrong", [("color",), ("shape",), ("place",), ("color", "shape"), ("color", "shape", "place")])
def test_each_wrong_part_costs_a_third_and_only_its_own_part(wrong: tuple[str, ...]) -> None:
    asked = [
        (
            _next(RGB, color) if "color" in wrong else color,
            _next(DRAW, shape) if "shape" in wrong else shape,
            _next(CENTER, place) if "place" in wrong else place,
        )
        for color, shape, place in ALL
    ]
    scores = score(asked, IMAGES)
    torch.testing.assert_close(scores.values, torch.full((64,), 1 - len(wrong) / 3))
    for part in ("color", "shape", "place"):
        assert scores.parts[part].tolist() == [float(part not in wrong)] * 64
    assert scores.parts["perfect"].tolist() == [0.0] * 64


def test_scores_do_not_depend_on_order_or_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = (IMAGES + 0.2 * torch.randn(IMAGES.shape, generator=generator)).clamp(0, 1)
    asked = [ALL[index] for index in torch.randperm(64, generator=generator).tolist()]
    whole = score(asked, noisy).values
    assert len(whole.unique()) > 1
    order = torch.randperm(64, generator=generator)
    torch.testing.assert_close(
        score([asked[i] for i in order.tolist()], noisy[order]).values, whole[order], rtol=0, atol=0
    )
    alone = torch.cat([score([asked[i]], noisy[i : i + 1]).values for i in range(64)])
    torch.testing.assert_close(alone, whole, rtol=0, atol=0)


def test_an_empty_canvas_and_a_white_one_get_nothing_for_what_is_not_there() -> None:
    images = torch.stack([torch.zeros(3, 64, 64), torch.ones(3, 64, 64)])
    parts = score([("red", "ring", "left")] * 2, images).parts
    # White is not a colour of the world and the full canvas has its centre in the middle.
    assert {name: part.tolist() for name, part in parts.items()} == {
        name: [0.0, 0.0] for name in ("color", "shape", "place", "perfect")
    }


def test_scattered_pixels_are_no_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(64, 64)
    mask[:, :32] = (torch.rand(64, 32, generator=generator) < 0.2).float()
    image = mask[None] * torch.tensor([1.0, 0, 0])[:, None, None]
    parts = score([("red", "disk", "left")], image[None]).parts
    assert (parts["color"].item(), parts["shape"].item(), parts["place"].item()) == (1, 0, 1)


def test_a_missing_key_names_the_sample_and_the_key() -> None:
    samples = wanting(ALL[:2], IMAGES[:2])
    del samples.metadata[1]["shape"]  # type: ignore[attr-defined]
    with pytest.raises(RewardFailed, match=r"metadata 'shape' of sample 's1' .* is missing"):
        build(ShapesConfig(), device="cpu").score(samples)


def test_an_unknown_word_names_the_sample_and_the_known_words() -> None:
    with pytest.raises(RewardFailed, match=r"'color' of sample 's0' is 'purple'; it is one of red, green"):
        score([("purple", "ring", "left")], IMAGES[:1])


def test_nan_pixels_name_the_sample() -> None:
    images = IMAGES[:3].clone()
    images[2, 1, 5, 5] = float("nan")
    with pytest.raises(RewardFailed, match=r"sample 's2' .* has NaN"):
        score(ALL[:3], images)


def test_pixels_outside_the_range_name_the_sample() -> None:
    images = IMAGES[:3].clone()
    images[1] = 2 * images[1] - 1
    with pytest.raises(RewardFailed, match=r"sample 's1' .* has values up to -1; pixels must lie in"):
        score(ALL[:3], images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (None, r"Set sampling\.decode=true"),
        (torch.zeros(1, 3, 32, 64), r"64 x 64 pixels, but got 32 x 64"),
    ],
)
def test_images_of_another_kind_are_refused(images: Tensor | None, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        score(ALL[:1], images)
