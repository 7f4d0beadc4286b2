"""The ELBO of finished samples, by hand and against the other errors of the forward process."""

from __future__ import annotations

import pytest
import torch
from unirl.numerics.elbo import elbo
from unirl.numerics.forward_process import Points, clean_estimate, matching_error, noised, self_weighted_error


def points(*, sigma: list[float]) -> Points:
    generator = torch.Generator().manual_seed(2)
    x0, x1 = torch.randn(3, 1, 4, 5, generator=generator), torch.randn(3, len(sigma), 4, 5, generator=generator)
    levels = torch.tensor(sigma).expand(3, -1)
    return Points(x0=x0, x1=x1, sigma=levels, x=noised(x0, x1, levels))


def test_by_hand() -> None:
    """Errors of 0.3 and -0.1 at level 0.4: a mean square of 0.05, and a mean absolute error of 0.2."""
    at = Points(x0=torch.zeros(1, 1, 2), x1=torch.zeros(1, 1, 2), sigma=torch.tensor([[0.4]]), x=torch.zeros(1, 1, 2))
    velocity = torch.tensor([[[0.3, -0.1]]], requires_grad=True)
    assert float(elbo(velocity, at).detach()) == pytest.approx(-0.05, rel=1e-6)
    adaptive = elbo(velocity, at, weighting="adaptive")
    assert float(adaptive.detach()) == pytest.approx(-0.4 / 0.2 * 0.05, rel=1e-6)
    adaptive.sum().backward()
    # The weight has no gradient: -2 x (0.3, -0.1).
    torch.testing.assert_close(velocity.grad, torch.tensor([[[-0.6, 0.2]]]), rtol=1e-6, atol=0)


def test_it_is_the_negative_error_of_flow_matching_and_of_the_clean_estimate() -> None:
    at = points(sigma=[0.1, 0.5, 1.0])
    velocity = torch.randn(at.x.shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(elbo(velocity, at), -matching_error(velocity, at))
    expected = -self_weighted_error(clean_estimate(at.x, velocity, at.sigma), at.x0)
    # The latter is fp32, of a difference of sigma v and sigma v*, here 1 and less.
    torch.testing.assert_close(elbo(velocity, at, weighting="adaptive").float(), expected, rtol=2e-5, atol=0)


def test_an_exact_velocity_and_a_level_of_0_are_finite() -> None:
    at = points(sigma=[0.0, 0.5])
    velocity = (at.x1 - at.x0).requires_grad_()
    result = elbo(velocity, at, weighting="adaptive")
    result.sum().backward()
    assert velocity.grad is not None and bool(torch.isfinite(velocity.grad).all())
    assert not result.detach().any()
