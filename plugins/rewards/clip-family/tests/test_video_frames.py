"""PickScore of videos against transformers' CLIPModel on the frames, and its refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.media import Media
from unirl.rewards.clip_family.config import VideoPickScoreConfig

Build = Callable[..., Any]
Samples = Callable[..., ScoreInput]
Noise = Callable[..., Tensor]
Tiny = Callable[[str], Mapping[str, Any]]
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
"""fp32 through two small encoders, whose sums each side takes in its own order."""


@pytest.fixture
def clips(samples: Samples) -> Callable[..., ScoreInput]:
    def made(*videos: Tensor) -> ScoreInput:
        blank = samples(torch.zeros(len(videos), 3, 1, 1))
        return dataclasses.replace(blank, media=Media(kind="video", values=videos, rate=8.0))

    return made


def test_the_score_is_the_mean_of_transformers_logits_on_frames_at_equal_distances(
    build: Build, tiny: Tiny, clips: Callable[..., ScoreInput], noise: Noise
) -> None:
    videos = (noise(9, 32, 32), noise(3, 32, 32), noise(1, 32, 32))
    given = clips(*videos)
    folder = tiny("video-pickscore")["path"]
    model: Any = CLIPModel.from_pretrained(folder)
    expected: list[float] = []
    # Four frames of nine; all of a video that has fewer.
    for video, places, prompt in zip(videos, ([0, 3, 5, 8], [0, 1, 2], [0]), given.inputs.prompts, strict=True):
        pictures = [Image.fromarray(np.uint8(video[place].permute(1, 2, 0).numpy() * 255 + 0.5)) for place in places]
        pixels = CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")["pixel_values"]
        words = AutoTokenizer.from_pretrained(folder)([prompt], return_tensors="pt")
        with torch.no_grad():
            expected.append(float(model(**words, pixel_values=pixels).logits_per_image.mean()))
    scores = build("video-pickscore", num_frames=4, batch_size=3).score(given)
    torch.testing.assert_close(scores.values, torch.tensor(expected) / 26, **CLOSE)
    torch.testing.assert_close(scores.parts["raw"], torch.tensor(expected), rtol=1e-5, atol=2e-3)


def test_the_gradient_reaches_the_frames_that_are_scored_and_no_others(
    build: Build, clips: Callable[..., ScoreInput], noise: Noise
) -> None:
    video = noise(5, 40, 40).requires_grad_()
    (gradient,) = torch.autograd.grad(build("video-pickscore", num_frames=3).score(clips(video)).values.sum(), video)
    assert [bool(frame.any()) for frame in gradient] == [True, False, True, False, True]


def test_the_frames_that_the_settings_name_are_all_that_is_read(
    build: Build, clips: Callable[..., ScoreInput], noise: Noise
) -> None:
    given, reward = clips(noise(9, 32, 32), noise(9, 32, 32)), build("video-pickscore", num_frames=4)
    config = VideoPickScoreConfig(num_frames=4)
    assert given.media is not None
    some = dataclasses.replace(given, media=given.media.with_frames(config.frames_read))
    assert some.media is not None and [len(video) for video in some.media.arrays] == [4, 4]
    assert torch.equal(reward.score(some).values, reward.score(given).values)


def test_what_is_no_video_is_refused(
    build: Build, samples: Samples, clips: Callable[..., ScoreInput], noise: Noise
) -> None:
    reward = build("video-pickscore")
    with pytest.raises(RewardFailed, match=r"^reward\.video-pickscore: got image, expected video"):
        reward.score(samples(noise(2, 8, 8)))
    with pytest.raises(RewardFailed, match=r"^reward\.video-pickscore: sample 's1' has no frames, expected 1 or more"):
        reward.score(clips(noise(2, 8, 8), torch.zeros(0, 3, 8, 8)))
    with pytest.raises(RewardFailed, match=r"^reward\.video-pickscore: got no samples, expected 1 or more"):
        reward.score(clips())
    broken = noise(4, 8, 8)
    broken[2, 0, 1, 1] = float("nan")
    with pytest.raises(RewardFailed, match=r"^reward\.video-pickscore: sample 's0, frame 2' .* from nan to nan"):
        reward.score(clips(broken))
