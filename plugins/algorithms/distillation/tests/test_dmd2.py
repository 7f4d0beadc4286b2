"""Distribution matching: its gradient, where it asks for velocities, and its identities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from forward_points import Velocities, clean_track
from unirl.algorithms.distillation.config import Dmd2Config
from unirl.algorithms.distillation.dmd2 import Dmd2, build
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

SIZE = 4
"""Elements of a latent."""


def make(**settings: Any) -> Dmd2:
    return build(
        Dmd2Config(**{"num_points": 3, **settings}),
        advantage=AdvantageConfig(),
        reward_weights={},
        train=TrainConfig(),
        seed=3,
    )


def trajectories(*, rows: int = 2, steps: int = 3) -> Track:
    """Samples whose latent at position k of row r is 10 r + k everywhere."""
    track = clean_track(torch.zeros(rows, SIZE))
    positions = torch.arange(steps + 1)
    latents = (10.0 * torch.arange(rows)[:, None] + positions)[:, :, None].expand(rows, steps + 1, SIZE)
    segment = dataclasses.replace(
        track.latent,
        latents=latents,
        positions=positions.expand(rows, steps + 1),
        sigmas=torch.linspace(1, 0, steps + 1),
    )
    return dataclasses.replace(track, segment=segment)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(algorithm: Dmd2, track: Track, forward: Velocities) -> torch.Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


def test_the_gradient_is_the_difference_of_both_clean_latents() -> None:
    """(mu_fake - mu_real) / mean |x0 - mu_real|, spread evenly over elements, points and rows, times -sigma by the
    student's clean estimate x - sigma v. The second sample, which weighs a half, has half of it."""
    live, fake, real = (drawn(2, 3, SIZE, seed=seed) for seed in (1, 2, 3))
    live.requires_grad_()
    track = dataclasses.replace(trajectories(), sample_weights=torch.tensor([1.0, 0.5]))
    forward = Velocities({"live": live, "fake": fake, "reference": real})
    loss = loss_of(make(), track, forward)
    loss.backward()
    (_, start, level), (_, x, sigma), _ = forward.asked
    clean = (start - level[..., None] * live.detach()).double()
    mu_fake, mu_real = ((x - sigma[..., None] * each).double() for each in (fake, real))
    gradient = (mu_fake - mu_real) / (clean - mu_real).abs().mean(dim=2, keepdim=True)
    share = torch.tensor([1.0, 0.5])[:, None, None] / (1.5 * 3)
    # The clean latents are fp32 numbers up to 16, of which differences are taken.
    torch.testing.assert_close(loss.detach().double(), (share * gradient.square() / 2).sum() / SIZE, rtol=1e-5, atol=0)
    expected = -level[..., None] * share * gradient / SIZE
    assert live.grad is not None
    torch.testing.assert_close(live.grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_fake_score_that_agrees_with_the_teacher_gives_no_gradient() -> None:
    live, same = drawn(2, 3, SIZE).requires_grad_(), drawn(2, 3, SIZE, seed=2)
    loss = loss_of(make(), trajectories(), Velocities({"live": live, "fake": same, "reference": same}))
    loss.backward()
    assert float(loss.detach()) == 0.0 and live.grad is not None and not live.grad.any()


def test_the_fake_score_learns_the_clean_estimates_of_the_student() -> None:
    """Flow matching: its loss is 0 for the velocity x1 - x0 of the line from x0 = x - sigma v, and has no gradient for
    the student."""
    live = drawn(2, 3, SIZE).requires_grad_()
    algorithm, track = make(), trajectories()
    forward = Velocities({"live": live, "fake": torch.zeros(1)})
    algorithm.fake_score_loss(track, forward, progress=0.0, repeat=0)
    (policy, start, level), (other, x, sigma) = forward.asked
    assert (policy, other) == ("live", "fake")
    clean = start - level[..., None] * live.detach()
    noise = (x - (1 - sigma[..., None]) * clean) / sigma[..., None]
    perfect = (noise - clean).requires_grad_()
    (term,) = algorithm.fake_score_loss(
        track, Velocities({"live": live, "fake": perfect}), progress=0.0, repeat=0
    ).terms
    # fp32 numbers of order 10, whose noise was divided by levels of 0.02 and more: (1e-6 x 10 / 0.02)^2.
    assert float(term.values.detach().max()) < 1e-6
    (wrong,) = algorithm.fake_score_loss(track, forward, progress=0.0, repeat=0).terms
    torch.testing.assert_close(wrong.values, (noise - clean).double().square().mean(dim=2), rtol=1e-4, atol=0)
    perfect.square().sum().backward()
    assert live.grad is None


def test_noise_is_drawn_anew_for_each_step_of_the_fake_score_and_for_the_student() -> None:
    algorithm, track = make(), trajectories()
    given = {"live": torch.zeros(1), "fake": torch.zeros(1), "reference": torch.zeros(1)}
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []
    for repeat in (None, 0, 1, 0):
        forward = Velocities(given)
        if repeat is None:
            algorithm.loss(track, forward, progress=0.0)
            (_, x, sigma), (policy, again, level) = forward.asked[1:]
            assert policy == "reference" and torch.equal(x, again) and torch.equal(sigma, level)
        else:
            algorithm.fake_score_loss(track, forward, progress=0.0, repeat=repeat)
        asked.append(forward.asked[1][1:])
    (_, matching), (_, first), (_, second), (_, third) = asked
    assert not torch.equal(matching, first) and not torch.equal(first, second)
    assert torch.equal(first, third) and torch.equal(asked[1][0], asked[3][0])


def test_levels_are_drawn_for_each_point_alone() -> None:
    """Over the whole range at every step of the student: the means over 256 samples at its first and at its last step
    are those of a uniform number, 0.5, within four times 0.96 / sqrt(12 * 256) = 0.0173."""
    forward = Velocities({"live": torch.zeros(1), "fake": torch.zeros(1), "reference": torch.ones(1)})
    make().loss(trajectories(rows=256), forward, progress=0.0)
    _, _, sigma = forward.asked[1]
    assert float(sigma.min()) >= 0.02 and float(sigma.max()) <= 0.98
    assert (sigma.mean(dim=0) - 0.5).abs().max() < 0.07


def test_each_step_is_trained_where_there_are_as_many_points() -> None:
    forward = Velocities({"live": torch.zeros(1), "fake": torch.zeros(1), "reference": torch.ones(1)})
    make().loss(trajectories(), forward, progress=0.0)
    _, x, sigma = forward.asked[0]
    assert x[:, :, 0].tolist() == [[2.0, 1.0, 0.0], [12.0, 11.0, 10.0]]
    torch.testing.assert_close(sigma, torch.tensor([[1 / 3, 2 / 3, 1.0]] * 2))


@pytest.mark.parametrize("of", ["loss", "fake_score_loss"])
def test_points_one_by_one_are_those_of_the_whole(of: str) -> None:
    algorithm, track = make(), trajectories()

    def velocities() -> Velocities:
        return Velocities({"live": torch.zeros(1), "fake": torch.zeros(1), "reference": torch.ones(1)})

    def asked(part: Track) -> list[tuple[torch.Tensor, torch.Tensor]]:
        forward = velocities()
        more = {"repeat": 2} if of == "fake_score_loss" else {}
        getattr(algorithm, of)(part, forward, progress=0.0, **more)
        return [(x, sigma) for _, x, sigma in forward.asked]

    whole, pieces = asked(track), [asked(piece) for piece in algorithm.pieces(track)]
    for number, (x, sigma) in enumerate(whole):
        assert torch.equal(torch.cat([piece[number][0] for piece in pieces], dim=1), x)
        assert torch.equal(torch.cat([piece[number][1] for piece in pieces], dim=1), sigma)


def test_sampling_with_all_noise_redrawn_is_that_of_the_paper() -> None:
    """`cps` with eta 1: the next latent is the clean estimate with new noise, (1 - s') (x - s v) + s' z."""
    kernel = make_kernel("cps", eta=1.0)
    x, velocity = drawn(2, SIZE), drawn(2, SIZE, seed=2)
    step = kernel.transition(
        x, velocity=velocity, sigma=torch.full((2,), 0.75), sigma_next=torch.full((2,), 0.5), sigma_max=1.0
    )
    # fp32 numbers of order 1; cos(pi / 2) is 6e-17 in fp64.
    torch.testing.assert_close(step.mean, 0.5 * (x - 0.75 * velocity), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(step.std.flatten(), torch.full((2,), 0.5), rtol=1e-6, atol=0)
