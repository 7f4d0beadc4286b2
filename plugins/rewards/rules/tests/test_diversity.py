"""Distances in a group, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.config import DiversityConfig
from unirl.rewards.rules.diversity import build


def scores(media: Media | None, groups: str, **settings: Any) -> list[float]:
    """groups: a letter for each sample."""
    samples = ScoreInput(
        sample_ids=tuple(f"s{row}" for row in range(len(groups))),
        group_ids=tuple(groups),
        inputs=Inputs.of_texts(["x"] * len(groups)),
        metadata=({},) * len(groups),
        media=media,
    )
    return build(DiversityConfig(**settings), device="cpu").score(samples).values.tolist()


def grey(*levels: float, size: int = 32) -> Media:
    return Media(kind="image", values=torch.stack([torch.full((3, size, size), level) for level in levels]))


def test_it_is_the_mean_difference_of_pixels_to_the_others_of_the_group() -> None:
    # Of 0, 0.5 and 1: (0.5 + 1) / 2, 0.5 and 0.75. The fourth is of another group, and alone.
    assert scores(grey(0.0, 1.0, 0.5, 0.2), "aaab") == pytest.approx([0.75, 0.75, 0.5, 0.0], abs=1e-6)
    assert scores(grey(0.0, 1.0, 0.5, 0.2), "aaab", to="nearest") == pytest.approx([0.5, 0.5, 0.5, 0.0], abs=1e-6)


def test_equal_samples_are_at_distance_zero() -> None:
    assert scores(grey(0.3, 0.3, 0.3), "aaa") == [0.0, 0.0, 0.0]


def test_half_an_image_counts_by_its_area() -> None:
    half = torch.zeros(2, 3, 64, 64)
    half[1, :, :, 32:] = 1.0
    # Half of the squared differences are 1.
    assert scores(Media(kind="image", values=half), "aa") == pytest.approx([0.5**0.5] * 2, abs=1e-6)


def test_grain_is_averaged_out() -> None:
    checks = torch.zeros(2, 3, 64, 64)
    checks[0, :, ::2, ::2] = checks[0, :, 1::2, 1::2] = 1.0
    checks[1, :, ::2, 1::2] = checks[1, :, 1::2, ::2] = 1.0
    assert scores(Media(kind="image", values=checks), "aa") == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_video_counts_by_its_frames() -> None:
    clips = torch.zeros(2, 16, 3, 16, 16)
    clips[1, 12:] = 1.0
    # A quarter of the frames differs by 1 everywhere.
    assert scores(Media(kind="video", values=clips, rate=8.0), "aa") == pytest.approx([0.5, 0.5], abs=1e-6)


def test_texts_differ_by_the_word_pairs_that_only_one_has() -> None:
    texts = Media(kind="text", values=("The red ring", "the red disk", "the red ring", "red", "red"))
    # Pairs {the red, red ring} and {the red, red disk} share one of three.
    expected = [(2 / 3 + 0) / 2, 2 / 3, (2 / 3 + 0) / 2, 0.0, 0.0]
    assert scores(texts, "aaabb") == pytest.approx(expected, abs=1e-6)
    assert scores(Media(kind="text", values=("", "", "a b")), "aaa") == pytest.approx([0.5, 0.5, 1.0])


def test_what_has_no_distance_is_refused() -> None:
    with pytest.raises(RewardFailed, match=r"reward\.diversity: got samples without media.*sampling\.decode=true"):
        scores(None, "aa")
    with pytest.raises(RewardFailed, match="got audio, expected image, video or text"):
        scores(Media(kind="audio", values=torch.zeros(2, 1, 8), rate=8.0), "aa")
    with pytest.raises(RewardFailed, match="pixels must lie in"):
        scores(grey(0.0, 2.0), "aa")
