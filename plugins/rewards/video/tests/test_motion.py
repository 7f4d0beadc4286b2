"""Motion of clips with known answers: squares, pans and plane waves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.rewards.video.config import MotionConfig, SoftMotionConfig
from unirl.rewards.video.motion import build, build_soft, flow_shifts, phase_shifts

Samples = Callable[..., ScoreInput]
Clip = Callable[..., Tensor]
STEPS = [(0, 0), (3, 0), (-2, 0), (0, 4), (0, -1), (2, -3)]


@pytest.mark.parametrize("step", STEPS)
def test_phase_correlation_finds_how_far_a_square_moves(square: Clip, step: tuple[int, int]) -> None:
    # The peak is symmetric around whole pixels: what is left is rounding of an FFT in fp32.
    expected = torch.tensor([step] * 4).float()
    torch.testing.assert_close(phase_shifts(square(step=step)), expected, rtol=0, atol=1e-3)


def test_phase_correlation_finds_a_pan_over_detail_of_an_odd_size(noise: Clip) -> None:
    ground = noise(3, 45, 61)
    video = torch.stack([ground.roll((2 * time, -5 * time), dims=(1, 2)) for time in range(3)])
    torch.testing.assert_close(phase_shifts(video), torch.tensor([[-5.0, 2.0]] * 2), rtol=0, atol=1e-3)


def test_phase_correlation_finds_half_pixels(square: Clip) -> None:
    """A square of twice the size, reduced: every other frame it lies between pixels."""
    video = torch.nn.functional.avg_pool2d(square(step=(3, 0), edge=24, size=(96, 128)), 2)
    # The centroid of three values of a peak that lies between two of them is short by up to a quarter of a pixel.
    assert float((phase_shifts(video) - torch.tensor([1.5, 0.0])).abs().max()) < 0.25


@pytest.mark.parametrize("move", [0.3, -0.8])
def test_flow_of_a_plane_wave_is_the_closed_form(move: float) -> None:
    """For cos(k x): differences in time and space give v = 2 tan(k v / 2) / sin(k), less the share of the floor."""
    k, width = 2 * math.pi / 16, 34
    x = torch.arange(width, dtype=torch.float64)
    wave = torch.stack([0.5 + 0.4 * torch.cos(k * (x - move * time)) for time in range(2)])
    video = wave[:, None, None, :].expand(2, 3, 20, width)
    # Of the mean of both frames, 32 columns inside: two whole periods, over which sin^2 has the mean 1/2.
    slope = (0.4 * math.sin(k) * math.cos(k * move / 2)) ** 2 / 2
    expected = 2 * math.tan(k * move / 2) / math.sin(k) * slope / (slope + 1e-5)
    (result,) = flow_shifts(video, edge_px=32)
    torch.testing.assert_close(result, torch.tensor([expected, 0.0], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [(1, 0), (0, -1), (1, 1)])
def test_flow_of_a_soft_square_is_its_step(square: Clip, step: tuple[int, int]) -> None:
    blurred = torch.nn.functional.avg_pool2d(square(step=step, edge=20, size=(96, 96)), 9, stride=1)
    # Edges of 9 pixels from black to white, 20 long: a mean squared slope of 5e-4, of which the floor takes 2 %.
    expected = torch.tensor([step] * 4).float()
    torch.testing.assert_close(flow_shifts(blurred, edge_px=96), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("step", "wanted", "expected"),
    [
        # 2 pixels at 8 frames a second are 16 / 48 = 1/3 of the shorter edge a second; s = 0.1.
        ((2, 0), "right", (1 / 3) / math.sqrt(1 / 9 + 0.01)),
        ((2, 0), "left", -(1 / 3) / math.sqrt(1 / 9 + 0.01)),
        ((2, 0), "up", 0.0),
        ((0, 2), "down", (1 / 3) / math.sqrt(1 / 9 + 0.01)),
        ((2, 0), "still", 0.01 / (1 / 9 + 0.01)),
        ((2, 0), [1 / 3, 0.0], 1.0),
        ((2, 0), [0.0, 1 / 3], 0.01 / (2 / 9 + 0.01)),
        ((0, 0), "still", 1.0),
        ((0, 0), "right", 0.0),
    ],
)
def test_the_score_is_the_formula(
    samples: Samples, square: Clip, step: tuple[int, int], wanted: Any, expected: float
) -> None:
    scores = build(MotionConfig(), device="cpu").score(samples([square(step=step)], motion=wanted))
    # Displacements are right to 1e-3 pixels of 2.
    assert float(scores.values) == pytest.approx(expected, abs=2e-3)
    velocity = torch.tensor([step[0] / 6, step[1] / 6, math.hypot(*step) / 6])
    parts = torch.cat([scores.parts[name] for name in ("x", "y", "speed")])
    torch.testing.assert_close(parts, velocity, rtol=0, atol=1e-3)


def test_velocities_are_per_second_and_per_edge(samples: Samples, square: Clip) -> None:
    """Half the rate at twice the resolution: the same motion in pixels is a quarter of the velocity."""
    near, far = square(step=(2, 0)), square(step=(2, 0), edge=24, size=(96, 128))
    reward = build(MotionConfig(), device="cpu")
    fast, slow = (
        float(reward.score(s).parts["x"])
        for s in (samples([near], motion="right", rate=16.0), samples([far], motion="right", rate=8.0))
    )
    assert fast == pytest.approx(4 * slow, rel=1e-3)


def test_motion_to_and_fro_is_not_still(samples: Samples, square: Clip) -> None:
    video = square(step=(4, 0), frames=2)[[0, 1, 0, 1, 0]]
    scores = build(MotionConfig(), device="cpu").score(samples([video], motion="still"))
    assert float(scores.parts["x"]) == pytest.approx(0, abs=1e-3)
    assert float(scores.parts["speed"]) == pytest.approx(4 * 8 / 48, abs=1e-3)
    assert float(scores.values) < 0.03


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (None, "is missing"),
        ("sideways", "is 'sideways'"),
        ([1.0], r"is \[1\.0\]"),
        ([1.0, float("nan")], r"is \[1\.0, nan\]"),
        ([True, 0.0], r"is \[True, 0\.0\]"),
        (["right", 0.0], r"is \['right', 0\.0\]"),
    ],
)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("motion", lambda: build(MotionConfig(), device="cpu")),
        ("soft-motion", lambda: build_soft(SoftMotionConfig(), device="cpu")),
    ],
)
def test_metadata_of_no_motion_names_its_sample(
    samples: Samples, square: Clip, name: str, make: Callable[[], Any], wanted: Any, said: str
) -> None:
    with pytest.raises(
        RewardFailed,
        match=rf"^reward\.{name}: metadata 'motion' of sample 's0' \(prompt 'a cat'\) {said}, expected left",
    ):
        make().score(samples([square(step=(1, 0))], motion=wanted))


def test_settings_are_checked() -> None:
    with pytest.raises(RecipeError, match=r"reward\.soft-motion\.edge_px.*4.*8 or more"):
        build_soft(SoftMotionConfig(edge_px=4), device="cpu")
