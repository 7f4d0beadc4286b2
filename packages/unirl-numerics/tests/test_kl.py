"""Estimators of the divergence: golden numbers, and what they and their gradients are on average."""

import dataclasses
import math

import pytest
import torch
from unirl.numerics.loss.kl import kl_estimate, next_kl_coefficient
from unirl.numerics.loss.kl_config import TokenKlConfig
from unirl.numerics.tokens.kl import token_kl


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.2), ("k2", 0.02), ("k3", math.exp(-0.2) - 0.8)])
def test_the_golden_numbers(estimator, expected):
    result = kl_estimate(doubles(-1.0), doubles(-1.2), estimator=estimator)
    assert float(result) == pytest.approx(expected, rel=1e-14)  # fp64; k3 is 0.0187308
    if estimator == "k3":
        assert float(result) == pytest.approx(0.0187308, abs=5e-8)  # the golden digits


def test_on_average_over_the_policy_they_are_what_they_say():
    """A categorical policy, where the expectation over samples is a sum: no noise, so fp64 tolerances."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    sampled = policy.exp().detach()

    def gradient(value):
        return torch.autograd.grad(value, [logits], retain_graph=True)[0]

    reverse = (policy.exp() * (policy - reference)).sum()
    forward = (reference.exp() * (reference - policy)).sum()
    k1, k2, k3 = (kl_estimate(policy, reference, estimator=name) for name in ("k1", "k2", "k3"))
    for value in (k1, k3):
        torch.testing.assert_close((sampled * value).sum(), reverse, rtol=1e-12, atol=0)
    assert bool((k3 >= 0).all())
    zero = torch.zeros(6, dtype=torch.float64)
    torch.testing.assert_close(gradient((sampled * k1).sum()), zero, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient((sampled * k2).sum()), gradient(reverse), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient((sampled * k3).sum()), gradient(forward), rtol=1e-12, atol=1e-14)
    through = kl_estimate(policy, reference, estimator="k3", straight_through=True)
    torch.testing.assert_close(through, k3, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient((sampled * through).sum()), gradient(reverse), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighted_by_the_ratio_they_are_the_same_over_an_older_policy(estimator, straight_through):
    """The expectation over samples of the old policy is a sum: the gradient is that of KL(pi || ref), exactly."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference, old = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, [logits], retain_graph=True)[0]

    reverse = (policy.exp() * (policy - reference)).sum()
    config = TokenKlConfig(
        kl_coef=0.1, kl_estimator=estimator, kl_straight_through=straight_through, kl_weighs_by_ratio=True
    )
    weighted = (old.exp() * token_kl(policy, reference, old_log_probs=old, config=config)).sum()
    torch.testing.assert_close(gradient(weighted), gradient(reverse), rtol=1e-11, atol=1e-13)
    # k2 is the second moment of the log-ratio, whatever it is weighted by.
    expected = reverse if estimator != "k2" else (policy.exp() * (policy - reference).square() / 2).sum()
    torch.testing.assert_close(weighted, expected, rtol=1e-12, atol=0)
    # Without the ratio none of them is: the samples are of another policy.
    plain = dataclasses.replace(config, kl_weighs_by_ratio=False)
    unweighted = (old.exp() * token_kl(policy, reference, old_log_probs=old, config=plain)).sum()
    assert float((gradient(unweighted) - gradient(reverse)).abs().max()) > 0.01


def test_any_shape_no_gradient_to_the_reference_and_no_overflow():
    log_probs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reference = log_probs.detach().clone().requires_grad_()
    for estimator in ("k1", "k2", "k3"):
        result = kl_estimate(log_probs, reference, estimator=estimator)
        assert result.shape == (2, 3, 4) and not result.detach().any()
        assert torch.autograd.grad(result.sum(), [reference], allow_unused=True)[0] is None
    assert bool(kl_estimate(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])).isfinite().all())
    with pytest.raises(ValueError, match="'k4' is not known"):
        kl_estimate(log_probs, reference, estimator="k4")
    with pytest.raises(ValueError, match="must be equal"):
        kl_estimate(log_probs, reference[0])


def test_the_proportional_rule():
    for kl, factor in ((6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.7, 0.995), (0.0, 0.98)):
        assert next_kl_coefficient(0.2, kl, target=6.0) == pytest.approx(0.2 * factor, rel=1e-12)
    # Ziegler et al.'s code has gain = samples / horizon.
    assert next_kl_coefficient(0.2, 60.0, target=6.0, gain=256 / 10000) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))


def test_the_doubling_rule():
    for kl, factor in ((0.01, 1.0), (0.0149, 1.0), (0.0151, 2.0), (0.0067, 1.0), (0.0066, 0.5)):
        assert next_kl_coefficient(0.4, kl, target=0.01, rule="doubling") == 0.4 * factor


def test_either_rule_finds_a_coefficient_that_holds_the_target():
    """With a divergence that falls with its coefficient as 1 / coefficient."""
    for rule in ("proportional", "doubling"):
        coefficient = 100.0
        for _ in range(400):
            coefficient = next_kl_coefficient(coefficient, 1 / coefficient, target=0.1, rule=rule)
        # Within the rule's own dead zone of 1.5; the proportional one has none, and a step of 2%.
        assert 1 / coefficient == pytest.approx(0.1, rel=0.5 if rule == "doubling" else 0.01)


def test_coefficients_that_cannot_adapt_are_refused():
    with pytest.raises(ValueError, match="stays 0"):
        next_kl_coefficient(0.0, 0.1, target=0.1)
    with pytest.raises(ValueError, match="not a number"):
        next_kl_coefficient(0.1, math.nan, target=0.1)
    with pytest.raises(ValueError, match="'other' is not known"):
        next_kl_coefficient(0.1, 0.1, target=0.1, rule="other")
