"""Distillation of velocities: its formula, where it asks for them, and its identities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from forward_points import Velocities, clean_track
from unirl.algorithms.distillation.config import VelocityDistillationConfig
from unirl.algorithms.distillation.velocities import VelocityDistillation, build
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.guidance import guided_velocity, make_guidance
from unirl.numerics.loss.reduction import reduce_terms, weight_totals


def make(**settings: Any) -> VelocityDistillation:
    return build(
        VelocityDistillationConfig(**{"num_points": 2, **settings}),
        advantage=AdvantageConfig(),
        reward_weights={},
        train=TrainConfig(),
        seed=3,
    )


def trajectories() -> Track:
    """Two samples of three steps: the latent at position k of row r is 10 r + k."""
    track = clean_track(torch.zeros(2, 2))
    latents = (10 * torch.arange(2.0)[:, None] + torch.arange(4.0))[:, :, None].expand(2, 4, 2)
    segment = dataclasses.replace(
        track.latent,
        latents=latents,
        positions=torch.arange(4).expand(2, 4),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.0]),
    )
    return dataclasses.replace(track, segment=segment)


def loss_of(algorithm: VelocityDistillation, track: Track, forward: Velocities) -> torch.Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.mark.parametrize("on_trajectory", [True, False])
def test_the_loss_is_the_mean_squared_difference_of_velocities(on_trajectory: bool) -> None:
    """And its gradient 2 (v - v_teacher) / (D n k); of the second sample, which weighs a half, half of that."""
    random = torch.Generator().manual_seed(1)
    live, teacher = (torch.randn(2, 2, 2, generator=random) for _ in range(2))
    live.requires_grad_()
    track = dataclasses.replace(trajectories(), sample_weights=torch.tensor([1.0, 0.5]))
    loss = loss_of(make(on_trajectory=on_trajectory), track, Velocities({"live": live, "reference": teacher}))
    share = torch.tensor([1.0, 0.5])[:, None, None] / (1.5 * 2 * 2)
    difference = live.detach() - teacher
    # One fp32 rounding of each of eight squares of order 1.
    torch.testing.assert_close(loss.detach(), (share * difference.double().square()).sum(), rtol=1e-6, atol=0)
    loss.backward()
    torch.testing.assert_close(live.grad, 2 * share * difference, rtol=1e-6, atol=0)


def test_both_are_asked_at_the_same_points_of_the_trajectory() -> None:
    """As many points as steps are all of them, and never the clean end."""
    forward = Velocities({"live": torch.zeros(1), "reference": torch.ones(1)})
    loss_of(make(num_points=3), trajectories(), forward)
    (asked, x, sigma), (then, again, level) = forward.asked
    assert {asked, then} == {"live", "reference"}
    assert torch.equal(x, again) and torch.equal(sigma, level)
    # From clean to noise.
    assert x[:, :, 0].tolist() == [[2.0, 1.0, 0.0], [12.0, 11.0, 10.0]]
    assert sigma.tolist() == [[0.5, 0.75, 1.0]] * 2


def test_off_the_trajectory_points_are_on_lines_from_the_sample_to_noise() -> None:
    forward = Velocities({"live": torch.zeros(1), "reference": torch.ones(1)})
    loss_of(make(on_trajectory=False, point_levels="uniform", num_points=64), trajectories(), forward)
    _, x, sigma = forward.asked[0]
    noise = (x - (1 - sigma[..., None]) * torch.tensor([3.0, 13.0])[:, None, None]) / sigma[..., None]
    # 256 standard normal numbers: their mean is good to 1/16, their variance to sqrt(2)/16; four times that.
    assert abs(float(noise.mean())) < 0.25 and abs(float(noise.var()) - 1) < 0.36


def test_samples_without_guidance_bring_negatives_in_one_forward() -> None:
    guidance = make_guidance("unirl.algorithms.distillation.guidance:WithNegatives")
    asked: list[Any] = []

    def velocity(x: torch.Tensor, sigma: torch.Tensor, conditions: Any) -> torch.Tensor:
        asked.append(conditions)
        return x * sigma[:, None] + conditions["shift"]

    given = {"positive": {"shift": torch.ones(2, 3)}, "negative": {"shift": torch.zeros(2, 3)}}
    x, sigma = torch.arange(6.0).view(2, 3), torch.tensor([0.5, 0.25])
    result = guided_velocity(velocity, x, sigma, conditions=given, guidance=guidance)
    assert torch.equal(result, x * sigma[:, None] + 1)
    assert len(asked) == guidance.num_forwards == 1 and asked[0] is given["positive"]
    with pytest.raises(ValueError, match="'negative' is missing"):
        guided_velocity(velocity, x, sigma, conditions={"positive": given["positive"]}, guidance=guidance)
    with pytest.raises(ValueError, match=r"got scale 2\.0, expected 1"):
        make_guidance("unirl.algorithms.distillation.guidance:WithNegatives", scale=2.0)


def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient() -> None:
    same = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = loss_of(make(), trajectories(), Velocities({"live": same, "reference": same.detach()}))
    loss.backward()
    assert float(loss.detach()) == 0.0 and same.grad is not None and not same.grad.any()
