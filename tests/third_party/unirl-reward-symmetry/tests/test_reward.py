"""Scores and gradients of images whose symmetry is plain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media

from symmetry_reward.config import SymmetryConfig
from symmetry_reward.reward import build, mirror_symmetry


def samples(images: Tensor | None, *, number: int) -> ScoreInput:
    return ScoreInput(
        sample_ids=tuple(f"s{row}" for row in range(number)),
        group_ids=("g",) * number,
        inputs=Inputs.of_texts(("a prompt",) * number),
        metadata=({},) * number,
        media=None if images is None else Media(kind="image", values=images),
    )


def halves() -> Tensor:
    """[2, 3, 4, 5]: black above and white below, which mirrors left to right; and a grey."""
    images = torch.full((2, 3, 4, 5), 0.5)
    images[0, :, :2], images[0, :, 2:] = 0.0, 1.0
    return images


@pytest.mark.parametrize(
    ("axis", "expected"), [("left-right", [1.0, 1.0]), ("top-bottom", [0.0, 1.0]), ("both", [0.5, 1.0])]
)
def test_a_mirror_image_scores_1_and_its_opposite_0(axis: str, expected: list[float]) -> None:
    scores = build(SymmetryConfig(axis=axis), device="cpu").score(samples(halves(), number=2))
    assert scores.values.tolist() == expected
    assert scores.parts["left-right"].tolist() == [1.0, 1.0]
    assert scores.parts["top-bottom"].tolist() == [0.0, 1.0]


def test_the_gradient_is_that_of_the_formula() -> None:
    images = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mirror_symmetry(images, dim=-1).sum().backward()
    pixels = images.detach()
    # Each pair occurs twice: d/dx of 1 - (1/n) * 2 (x - x')^2, n pixels an image.
    torch.testing.assert_close(images.grad, -4 * (pixels - pixels.flip(-1)) / pixels[0].numel())


def test_what_cannot_be_scored_raises() -> None:
    reward = build(SymmetryConfig(), device="cpu")
    with pytest.raises(RewardFailed, match="samples without media, expected image"):
        reward.score(samples(None, number=1))
    images = halves()
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(RewardFailed, match="sample 's1'"):
        reward.score(samples(images, number=2))


def test_an_axis_that_is_none_is_refused() -> None:
    with pytest.raises(RecipeError, match="axis: got 'diagonal', expected one of left-right, top-bottom, both"):
        build(SymmetryConfig(axis="diagonal"), device="cpu")
