from __future__ import annotations

from itertools import combinations

import torch
from unirl.rewards.rules.clips_reading import read_clip
from unirl.rewards.rules.clips_world import ALL_CLIPS, DIRECTIONS, MOTIONS, NUM_FRAMES, render_clips
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


def test_clips_of_every_caption_read_as_what_they_show() -> None:
    generator = torch.Generator().manual_seed(0)
    for clip in ALL_CLIPS:
        for frames in render_clips(clip, count=20, generator=generator):
            seen = read_clip(frames)
            assert seen.color.tolist() == [list(COLORS).index(clip.color)] * NUM_FRAMES
            assert seen.shape.tolist() == [SHAPES.index(clip.shape)] * NUM_FRAMES
            assert seen.motion.tolist() == [list(MOTIONS).index(clip.motion)] * (NUM_FRAMES - 1)


def test_a_shape_is_all_on_the_canvas_and_moves_evenly_and_straight() -> None:
    generator = torch.Generator().manual_seed(1)
    axis = torch.arange(32.0)
    for clip in ALL_CLIPS[:16]:
        frames = render_clips(clip, count=4, generator=generator).amax(dim=2)
        border = torch.cat([frames[..., 0, :], frames[..., -1, :], frames[..., 0], frames[..., -1]], dim=-1)
        assert border.max() == 0
        area = frames.sum(dim=(2, 3))
        centers = torch.stack([frames.sum(dim=2) @ axis, frames.sum(dim=3) @ axis], dim=-1) / area[..., None]
        steps = centers.diff(dim=1)
        along = steps @ torch.tensor(DIRECTIONS[clip.motion])
        # 12 to 15 px in four steps. Coverage is by the distance to the nearest edge, so that the centre of a soft edge
        # is off by up to a tenth of a pixel.
        assert along.min() > 2.9 and along.max() < 3.85
        assert (along[:, 1:] - along[:, :-1]).abs().max() < 0.2
        assert (steps.norm(dim=-1) - along).abs().max() < 1e-2


def test_clips_are_a_function_of_the_generator() -> None:
    first, second = (render_clips(ALL_CLIPS[9], count=3, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.equal(second)
    assert not first[0].equal(first[1])
