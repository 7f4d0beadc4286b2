"""The forward process: its draws belong to samples, and its formulas agree with each other."""

import pytest
import torch
from unirl.numerics.forward_process import (
    clean_estimate,
    forward_noise,
    forward_sigmas,
    levels_at,
    noised,
    self_weighted_error,
    velocity_target,
)
from unirl.numerics.noise import noise

SCHEDULE = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])

IDS = ("r0/a/0", "r0/a/1", "r3/b/0")


def test_draws_depend_on_seed_sample_and_number_alone():
    whole = forward_noise(seed=7, ids=IDS, draws=4, shape=(3, 2))
    assert whole.shape == (3, 4, 3, 2) and whole.dtype == torch.float32
    assert torch.equal(forward_noise(seed=7, ids=IDS[2:], draws=2, shape=(3, 2)), whole[2:, :2])
    rows = [whole, forward_noise(seed=8, ids=IDS, draws=4, shape=(3, 2))]
    # Every row is another one: of each seed, sample and draw.
    assert len(torch.cat([row.flatten(0, 1) for row in rows]).flatten(1).unique(dim=0)) == 24
    sigmas = forward_sigmas(seed=7, ids=IDS, draws=4)
    assert torch.equal(forward_sigmas(seed=7, ids=IDS[1:2], draws=4), sigmas[1:2])
    assert not torch.equal(forward_sigmas(seed=8, ids=IDS, draws=4), sigmas)


def test_the_noise_of_generation_is_not_drawn_again():
    drawn = forward_noise(seed=7, ids=IDS[:1], draws=2, shape=(6,))[0]
    for rollout in range(3):
        for step in (-1, 0, 1):
            generated = noise(seed=7, rollout=rollout, ids=IDS[:1], step=step, shape=(6,))
            assert not any(torch.equal(generated[0], row) for row in drawn)


def test_noise_levels_are_stratified_and_uniform():
    draws = 5
    sigmas = forward_sigmas(seed=1, ids=[f"s{row}" for row in range(4000)], draws=draws).double()
    strata = torch.arange(draws) / draws
    # fp32 may round the largest numbers of a stratum up to its end.
    assert bool((sigmas >= strata).all()) and bool((sigmas <= strata + 1 / draws).all())
    # Within a stratum: mean 1/2, variance 1/12; 4000 draws have a standard error of 0.0046 for the mean.
    inside = (sigmas - strata) * draws
    torch.testing.assert_close(inside.mean(0), torch.full((draws,), 0.5, dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close(inside.var(0), torch.full((draws,), 1 / 12, dtype=torch.float64), rtol=0.05, atol=0)


def test_levels_follow_their_distribution():
    quantiles = torch.tensor([[0.0, 0.24], [0.26, 0.5], [0.76, 1.0]])
    # Rising from the last level above 0 to the first one; the end of the schedule is clean and is not drawn.
    expected = torch.tensor([[0.4, 0.4], [0.7, 0.9], [1.0, 1.0]])
    assert torch.equal(levels_at(quantiles, kind="schedule", schedule=SCHEDULE), expected)
    assert torch.equal(levels_at(quantiles, kind="uniform", schedule=SCHEDULE), quantiles)
    # The standard normal has its quartile at 0.6744897502; 0 and 1 are the ends of the line.
    ends = levels_at(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), kind="logit-normal", schedule=SCHEDULE)
    quartile = 1 / (1 + 2.718281828459045**0.6744897502)
    torch.testing.assert_close(ends, torch.tensor([0.0, quartile, 0.5, 1 - quartile, 1.0]), rtol=1e-6, atol=1e-7)


def test_a_range_holds_its_levels():
    """A fraction of the steps: with quantiles from 1/4, the last of four steps is left out."""
    sigmas = forward_sigmas(seed=1, ids=[f"s{row}" for row in range(64)], draws=6, between=(0.25, 1.0))
    levels = levels_at(sigmas, kind="schedule", schedule=SCHEDULE)
    assert sorted(set(levels.flatten().tolist())) == pytest.approx([0.7, 0.9, 1.0])
    # Six draws over three steps: each step twice, in every row.
    assert bool((levels == 0.9).sum(dim=1).eq(2).all())


def test_the_line_starts_at_the_sample_ends_at_the_noise_and_has_the_target_as_its_slope():
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(2, 1, 3, 2, generator=generator, dtype=torch.float64)
    x1 = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([[0.0, 1.0, 0.3, 0.7]] * 2, dtype=torch.float64)
    x = noised(x0, x1, sigma)
    assert torch.equal(x[:, 0], x0[:, 0]) and torch.equal(x[:, 1], x1[:, 1])
    torch.testing.assert_close(
        (x - x0) / sigma.clamp_min(1e-9)[:, :, None, None], velocity_target(x0, x1) * (sigma > 0)[:, :, None, None]
    )
    torch.testing.assert_close(clean_estimate(x, velocity_target(x0, x1), sigma), x0.expand_as(x))


def test_the_weighted_error_is_the_mean_square_over_the_mean_absolute_error():
    estimate = torch.tensor([[[3.0, 1.0], [0.0, 0.0]]], requires_grad=True)
    x0 = torch.zeros(1, 1, 2)
    # (9 + 1) / 2 over (3 + 1) / 2; an exact estimate divides by the least error.
    weighted = self_weighted_error(estimate, x0)
    assert weighted.detach().tolist() == [[2.5, 0.0]]
    assert self_weighted_error(estimate, x0, adaptive=False).detach().tolist() == [[5.0, 0.0]]
    weighted.sum().backward()
    # 2 e / D over the divisor, which has no gradient.
    assert estimate.grad.tolist() == [[[pytest.approx(1.5), pytest.approx(0.5)], [0.0, 0.0]]]
