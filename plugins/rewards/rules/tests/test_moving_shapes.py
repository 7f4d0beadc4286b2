"""The reward of moving shapes, on clips drawn by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hand_drawn_shapes import ALL_CLIPS, DRAW, RGB, STEP, draw_clip
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules import moving_shapes
from unirl.rewards.rules.clips_reading import ClipReading, read_clip
from unirl.rewards.rules.config import MovingShapesConfig
from unirl.rewards.rules.moving_shapes import build

KEYS = ("color", "shape", "motion")
CLIPS = [draw_clip(*triple) for triple in ALL_CLIPS]
ORDER = {"color": list(RGB), "shape": list(DRAW), "motion": list(STEP)}


def wanting(triples: Sequence[Sequence[str]], clips: Sequence[Tensor]) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(len(triples)))
    return ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts([" ".join(triple) for triple in triples]),
        metadata=tuple(dict(zip(KEYS, triple, strict=True)) for triple in triples),
        media=Media(kind="video", values=tuple(clips), rate=16.0),
    )


def score(triples: Sequence[Sequence[str]], clips: Sequence[Tensor]) -> Scores:
    return build(MovingShapesConfig(), device="cpu").score(wanting(triples, clips))


def next_word(key: str, word: str) -> str:
    order = ORDER[key]
    return order[(order.index(word) + 1) % len(order)]


def check_wrong_parts(wrong: Sequence[str]) -> None:
    """Every wrong part costs a third, and its own part alone."""
    asked = [
        [next_word(key, word) if key in wrong else word for key, word in zip(KEYS, triple, strict=True)]
        for triple in ALL_CLIPS
    ]
    scores = score(asked, CLIPS)
    torch.testing.assert_close(scores.values, torch.full((64,), 1 - len(wrong) / 3))
    for key in KEYS:
        assert scores.parts[key].tolist() == [float(key not in wrong)] * 64
    assert scores.parts["perfect"].tolist() == [float(not wrong)] * 64


@pytest.mark.parametrize("wrong", [(), ("color",), ("shape",), ("motion",), ("color", "motion"), KEYS])
def test_each_wrong_part_costs_a_third_and_only_its_own_part(wrong: tuple[str, ...]) -> None:
    check_wrong_parts(wrong)


def _any_motion(reading: ClipReading, frames: Tensor) -> Tensor:
    """Mutant: whatever moves goes the first way."""
    return torch.where(reading.motion >= 0, 0, reading.motion)


def _axis_only(reading: ClipReading, frames: Tensor) -> Tensor:
    """Mutant: the sign of a step is lost, so that left is right and up is down."""
    return torch.where(reading.motion >= 0, reading.motion // 2 * 2, reading.motion)


def _backwards(reading: ClipReading, frames: Tensor) -> Tensor:
    """Mutant: time runs backwards."""
    return read_clip(frames.flip(0)).motion


@pytest.mark.parametrize("mutant", [_any_motion, _axis_only, _backwards])
def test_a_reward_that_ignores_the_direction_would_be_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(frames: Tensor) -> ClipReading:
        reading = read_clip(frames)
        return dataclasses.replace(reading, motion=mutant(reading, frames))

    monkeypatch.setattr(moving_shapes, "read_clip", read)
    with pytest.raises(AssertionError):
        check_wrong_parts(())
        check_wrong_parts(("motion",))


def test_scores_are_shares_of_frames_and_of_steps() -> None:
    clip, asked = draw_clip("red", "ring", "left"), ("red", "ring", "left")
    still = clip[2].expand(5, -1, -1, -1)
    late = torch.cat([clip[:1], clip[:1], clip[:3]])
    green_at_last = torch.cat([clip[:3], clip[3:].flip(1).roll(-1, dims=1)])
    assert green_at_last[4].amax(dim=(1, 2)).tolist() == [0, 1, 0]
    gone = torch.cat([clip[:4], torch.zeros_like(clip[:1])])
    cases = {
        "still": (still, (1, 1, 0)),
        "played backwards": (clip.flip(0), (1, 1, 0)),
        "two steps of four": (late, (1, 1, 1 / 2)),
        "another color for two frames of five": (green_at_last, (3 / 5, 1, 1)),
        "gone in the last frame": (gone, (4 / 5, 4 / 5, 3 / 4)),
        "black": (torch.zeros_like(clip), (0, 0, 0)),
        # All lit is a square to the reader of images, and white is not a colour.
        "white": (torch.ones_like(clip), (0, 0, 0)),
    }
    scores = score([asked] * len(cases), [frames for frames, _ in cases.values()])
    for row, (name, (_, expected)) in enumerate(cases.items()):
        result = [scores.parts[key][row].item() for key in KEYS]
        # Shares of a few frames in fp32.
        assert result == pytest.approx(expected, abs=1e-6), name
        assert scores.values[row].item() == pytest.approx(sum(expected) / 3, abs=1e-6), name
        assert scores.parts["perfect"][row].item() == 0, name


def test_one_still_or_constant_answer_scores_as_a_guess() -> None:
    """One of four words of each key is right: a constant clip gets a quarter of each part, a still one no motion."""
    for clip, motion in (
        (draw_clip("blue", "disk", "up"), 1 / 4),
        (draw_clip("blue", "disk", "up")[:1].expand(5, -1, -1, -1), 0),
    ):
        values = score(ALL_CLIPS, [clip] * 64).values
        assert values.mean().item() == pytest.approx((1 / 4 + 1 / 4 + motion) / 3, abs=1e-6)


def test_scores_depend_neither_on_the_batch_nor_on_other_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    clips = [(clip + 0.2 * torch.randn(clip.shape, generator=generator)).clamp(0, 1) for clip in CLIPS]
    clips[3], clips[40] = clips[3][:3], torch.cat([clips[40], clips[41]])
    asked = [ALL_CLIPS[index] for index in torch.randperm(64, generator=generator).tolist()]
    whole = score(asked, clips).values
    assert len(whole.unique()) > 3
    alone = torch.cat([score([triple], [clip]).values for triple, clip in zip(asked, clips, strict=True)])
    assert torch.equal(alone, whole)


def test_what_cannot_be_scored_is_refused() -> None:
    clip, asked = CLIPS[0], ALL_CLIPS[0]
    for frames, result in ((clip[:1], "1 frames of 32 x 32"), (clip[..., :24], "5 frames of 32 x 24")):
        with pytest.raises(
            RewardFailed, match=rf"moving-shapes: got {result} pixels in sample 's0', expected 2 or more"
        ):
            score([asked], [frames])
    with pytest.raises(
        RewardFailed, match=r"metadata 'motion' of sample 's0' is 'sideways'; it is one of left, right, up"
    ):
        score([(*asked[:2], "sideways")], [clip])
    with pytest.raises(RewardFailed, match=r"sample 's0, frame 2' .* has NaN"):
        score([asked], [torch.where(torch.arange(5)[:, None, None, None] == 2, torch.nan, clip)])
