from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor
from unirl.rewards.rules.clips_reading import read_clip
from unirl.rewards.rules.clips_world import (
    ALL_CLIPS,
    DIRECTIONS,
    MOTIONS,
    NUM_FRAMES,
    Clip,
    render_clips,
    render_onward_clips,
)
from unirl.rewards.rules.shapes_world import COLORS, SHAPES


def test_the_world_has_64_captions_and_16_are_held_out() -> None:
    assert len({clip.caption for clip in ALL_CLIPS}) == 64
    assert sum(clip.is_held_out for clip in ALL_CLIPS) == 16
    assert {"a red ring moves to the left", "a blue disk moves up"} <= {clip.caption for clip in ALL_CLIPS}


def test_every_pair_of_attributes_occurs_in_both_splits() -> None:
    for first, second in combinations(("color", "shape", "motion"), 2):
        for held_out in (False, True):
            clips = [clip for clip in ALL_CLIPS if clip.is_held_out is held_out]
            assert len({(getattr(clip, first), getattr(clip, second)) for clip in clips}) == 16


@pytest.mark.parametrize("render", [render_clips, render_onward_clips])
def test_clips_of_every_caption_read_as_what_they_show(render: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for clip in ALL_CLIPS:
        for frames in render(clip, count=20, generator=generator):
            seen = read_clip(frames)
            assert seen.color.tolist() == [list(COLORS).index(clip.color)] * NUM_FRAMES
            assert seen.shape.tolist() == [SHAPES.index(clip.shape)] * NUM_FRAMES
            assert seen.motion.tolist() == [list(MOTIONS).index(clip.motion)] * (NUM_FRAMES - 1)


# 12 to 15 px in four steps, and 5 to 6.5.
@pytest.mark.parametrize(("render", "low", "high"), [(render_clips, 3.0, 3.75), (render_onward_clips, 1.25, 1.625)])
def test_a_shape_is_all_on_the_canvas_and_moves_evenly_and_straight(
    render: Callable[..., Tensor], low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    axis = torch.arange(32.0)
    for clip in ALL_CLIPS[:16]:
        frames = render(clip, count=4, generator=generator).amax(dim=2)
        border = torch.cat([frames[..., 0, :], frames[..., -1, :], frames[..., 0], frames[..., -1]], dim=-1)
        assert border.max() == 0
        area = frames.sum(dim=(2, 3))
        centers = torch.stack([frames.sum(dim=2) @ axis, frames.sum(dim=3) @ axis], dim=-1) / area[..., None]
        steps = centers.diff(dim=1)
        along = steps @ torch.tensor(DIRECTIONS[clip.motion])
        # Coverage is by the distance to the nearest edge, so that the centre of a soft edge is off by up to a tenth of
        # a pixel.
        assert along.min() > low - 0.1 and along.max() < high + 0.1
        assert (along[:, 1:] - along[:, :-1]).abs().max() < 0.2
        assert (steps.norm(dim=-1) - along).abs().max() < 1e-2


def test_a_clip_that_starts_in_the_middle_does_not_tell_its_direction_in_the_first_frame() -> None:
    """From the same draws, frames of all directions are those of the shape at places that are as likely: within 1.5 px
    of the middle, on either side of it."""
    axis = torch.arange(32.0)
    for motion in MOTIONS:
        clip = Clip(color="red", shape="square", motion=motion)
        first = render_onward_clips(clip, count=400, generator=torch.Generator().manual_seed(2))[:, 0].amax(dim=1)
        area = first.sum(dim=(1, 2))
        centers = torch.stack([first.sum(dim=1) @ axis, first.sum(dim=2) @ axis], dim=-1) / area[:, None] - 15.5
        # The centre of a soft edge is off by up to a tenth of a pixel.
        assert centers.abs().max() < 1.5 + 0.1
        # Uniform in [-1.5, 1.5]: variance 0.75, kurtosis 1.8. Three standard errors of the mean; those of the deviation
        # are 3 sqrt(0.8 / 1600) = 7 % of it, and soft edges add up to 5 %.
        assert centers.mean(dim=0).abs().max() < 3 * (0.75 / 400) ** 0.5
        assert centers.std(dim=0).tolist() == pytest.approx([0.75**0.5] * 2, rel=0.12)


def test_clips_are_a_function_of_the_generator() -> None:
    first, second = (render_clips(ALL_CLIPS[9], count=3, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.equal(second)
    assert not first[0].equal(first[1])
