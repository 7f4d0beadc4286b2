"""Smoothness, flicker and first frames against their formulas; what all rule rewards refuse; gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.core.errors import DataError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.data import MediaRef
from unirl.core.types.media import Media
from unirl.rewards.video import first_frame, motion, temporal
from unirl.rewards.video.config import FirstFrameConfig, MotionConfig, SoftMotionConfig, TemporalConfig

Samples = Callable[..., ScoreInput]
Clip = Callable[..., Tensor]
REWARDS: dict[str, tuple[Callable[[], Any], int]] = {
    "motion": (lambda: motion.build(MotionConfig(), device="cpu"), 2),
    "soft-motion": (lambda: motion.build_soft(SoftMotionConfig(edge_px=8), device="cpu"), 2),
    "temporal": (lambda: temporal.build(TemporalConfig(), device="cpu"), 3),
    "first-frame": (lambda: first_frame.build(FirstFrameConfig(), device="cpu"), 1),
}
"""And the frames that each needs."""


def ref(file: Path) -> MediaRef:
    return MediaRef(modality="image", role="first_frame", uri=str(file))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "first.png")
    return tmp_path / "first.png"


@pytest.mark.parametrize("step", [1, 3])
def test_smoothness_of_a_moving_square(samples: Samples, square: Clip, step: int) -> None:
    """D is 1 in absolute value on four strips of step x edge pixels: the new and the last one at either side."""
    scores = temporal.build(TemporalConfig(), device="cpu").score(samples([square(step=(step, 0))]))
    share = step * 12 / (48 * 64)
    assert float(scores.parts["smoothness"]) == pytest.approx(1 - math.sqrt(share), abs=1e-6)
    # The mean over a frame stays: the square keeps its size.
    assert float(scores.parts["steadiness"]) == pytest.approx(1, abs=1e-6)
    assert float(scores.parts["change"]) == pytest.approx(math.sqrt(2 * share), abs=1e-6)
    assert float(scores.values) == pytest.approx(1 - math.sqrt(share) / 2, abs=1e-6)


def test_a_fade_is_smooth_and_a_flicker_is_not(samples: Samples, noise: Clip) -> None:
    ground = 0.2 + 0.2 * noise(3, 16, 24)
    fade = torch.stack([ground + 0.1 * time for time in range(5)])
    flicker = torch.stack([ground + 0.25 * (time % 2) for time in range(5)])
    scores = temporal.build(TemporalConfig(), device="cpu").score(samples([fade, flicker]))
    # Brightness goes up and down by 0.25: D is 0.5 everywhere.
    for name in ("smoothness", "steadiness"):
        torch.testing.assert_close(scores.parts[name], torch.tensor([1.0, 0.75]), rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.parts["change"], torch.tensor([0.1, 0.25]), rtol=0, atol=1e-6)


def test_noise_in_time_is_no_flicker_of_the_whole(samples: Samples, noise: Clip) -> None:
    """Independent pixels of variance 1/12: D has the variance 6/12, its mean over a frame next to none."""
    scores = temporal.build(TemporalConfig(), device="cpu").score(samples([noise(8, 3, 64, 64)]))
    # 70,000 values of D: their rms varies by half a percent.
    assert float(scores.parts["smoothness"]) == pytest.approx(1 - math.sqrt(0.5) / 2, abs=5e-3)
    assert float(scores.parts["steadiness"]) > 0.98


def test_first_frame_is_one_less_the_rms_difference(samples: Samples, noise: Clip, picture: Path) -> None:
    image = torch.from_numpy(np.asarray(Image.open(picture)).copy()).permute(2, 0, 1).float() / 255
    same, off = noise(3, 3, 20, 28), noise(3, 3, 20, 28)
    same[0] = image
    off[0] = torch.where(image > 0.5, image - 0.2, image + 0.2)
    scores = first_frame.build(FirstFrameConfig(), device="cpu").score(samples([same, off], refs=[ref(picture)]))
    torch.testing.assert_close(scores.values, torch.tensor([1.0, 0.8]), rtol=0, atol=1e-6)


def test_a_first_frame_of_another_size_is_scaled_as_pillow_does(samples: Samples, picture: Path) -> None:
    scaled = Image.open(picture).resize((56, 40), Image.Resampling.BICUBIC)
    video = (torch.from_numpy(np.asarray(scaled).copy()).permute(2, 0, 1).float() / 255)[None]
    score = first_frame.build(FirstFrameConfig(), device="cpu").score(samples([video], refs=[ref(picture)])).values
    # Pillow rounds to 8 bits after each pass: 1.2 / 255 at most.
    assert 1 - 1.2 / 255 <= float(score) < 1


def test_a_prompt_without_its_one_first_frame_is_refused(samples: Samples, noise: Clip, picture: Path) -> None:
    reward = first_frame.build(FirstFrameConfig(), device="cpu")
    source = dataclasses.replace(ref(picture), role="source")
    for refs, count in (([], 0), ([source], 0), ([ref(picture)] * 2, 2)):
        with pytest.raises(
            RewardFailed, match=rf"^reward\.first-frame: got {count} images of role `first_frame` for sample 's0'"
        ):
            reward.score(samples([noise(2, 3, 8, 8)], refs=refs))
    with pytest.raises(DataError, match=r"gone\.png.* cannot be opened"):
        reward.score(samples([noise(2, 3, 8, 8)], refs=[ref(picture.with_name("gone.png"))]))


@pytest.mark.parametrize("name", REWARDS)
def test_what_is_no_video_is_refused(samples: Samples, noise: Clip, picture: Path, name: str) -> None:
    make, least = REWARDS[name]
    reward, given = make(), {"motion": "right", "refs": [ref(picture)]}
    whole = samples([noise(4, 3, 8, 8), noise(4, 3, 8, 8)], **given)
    images = dataclasses.replace(whole, media=Media(kind="image", values=noise(2, 3, 8, 8)))
    with pytest.raises(RewardFailed, match=rf"^reward\.{name}: got image, expected video\.$"):
        reward.score(images)
    with pytest.raises(RewardFailed, match=rf"^reward\.{name}: got no samples, expected 1 or more"):
        reward.score(samples([], **given))
    with pytest.raises(
        RewardFailed, match=rf"^reward\.{name}: got {least - 1} frames in sample 's1', expected {least} or"
    ):
        reward.score(samples([noise(4, 3, 8, 8), noise(least - 1, 3, 8, 8)], **given))
    for value in (float("nan"), 1.5):
        broken = noise(4, 3, 8, 8)
        broken[3, 2, 7, 7] = value
        with pytest.raises(
            RewardFailed, match=rf"^reward\.{name}: sample 's1' \(prompt 'a cat'\) has values .*; pixels must"
        ):
            reward.score(samples([noise(4, 3, 8, 8), broken], **given))


@pytest.mark.parametrize("name", REWARDS)
def test_videos_of_several_lengths_and_sizes_score_as_they_do_alone(
    samples: Samples, noise: Clip, picture: Path, name: str
) -> None:
    reward = REWARDS[name][0]()
    videos = [noise(4, 3, 12, 16), noise(3, 3, 24, 9, seed=1), noise(6, 3, 12, 16, seed=2)]
    given = {"motion": "down", "refs": [ref(picture)]}
    together = reward.score(samples(videos, **given))
    backwards = reward.score(samples(videos[::-1], **given))
    alone = [reward.score(samples([video], **given)) for video in videos]
    # Each video is computed by itself: bit for bit.
    assert torch.equal(together.values, torch.cat([scores.values for scores in alone]))
    assert torch.equal(together.values, backwards.values.flip(0))
    for part, values in together.parts.items():
        assert torch.equal(values, torch.cat([scores.parts[part] for scores in alone]))


@pytest.mark.parametrize("name", ["soft-motion", "temporal", "first-frame"])
def test_the_gradient_is_that_of_finite_differences(samples: Samples, noise: Clip, picture: Path, name: str) -> None:
    reward = REWARDS[name][0]()
    video = (0.1 + 0.8 * noise(3, 3, 10, 9)).double().requires_grad_()

    def score(pixels: Tensor) -> Tensor:
        return reward.score(samples([pixels], motion="left", refs=[ref(picture)])).values

    # In fp64, along a random direction; differences of 1e-6 keep ten digits.
    assert torch.autograd.gradcheck(score, video, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)
    assert float(torch.autograd.grad(score(video).sum(), video)[0].abs().sum()) > 0


def test_motion_by_phase_correlation_gives_no_gradient(samples: Samples, noise: Clip) -> None:
    video = noise(3, 3, 10, 9).requires_grad_()
    assert not REWARDS["motion"][0]().score(samples([video], motion="left")).values.requires_grad
