"""The coefficient of a divergence over steps, against Ziegler et al.'s rule worked out by hand."""

import math

import pytest
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.kl_config import KlConfig

ADAPTIVE = KlConfig(kl_coef=0.2, kl_target=6.0, kl_horizon=1000.0)


def test_the_coefficient_follows_the_rule_step_by_step():
    """clip(kl / 6 - 1, -0.2, 0.2) times samples / 1000, of steps of 250 samples and of 100."""
    kl = AdaptiveKl(ADAPTIVE)
    steps = (
        (60.0, 250, 1.05),
        (3.0, 250, 0.95),
        (6.6, 250, 1.025),
        (5.7, 100, 0.995),
        (6.0, 100, 1.0),
        (0.0, 100, 0.98),
    )
    expected = 0.2
    for measured, samples, factor in steps:
        # The step's own coefficient is logged, then it moves on.
        assert kl.end_step({"kl": measured, "samples": float(samples), "loss": 1.0}) == {
            "kl_coef": pytest.approx(expected)
        }
        expected *= factor
        # fp64, three operations a step.
        assert kl.kl_coef == pytest.approx(expected, rel=1e-14)


def test_a_step_without_a_divergence_leaves_the_coefficient():
    """None was measured, or it is not a number; one that is infinite is above any target."""
    kl = AdaptiveKl(ADAPTIVE)
    assert kl.end_step({"samples": 250.0}) == kl.end_step({"samples": 250.0, "kl": math.nan}) == {"kl_coef": 0.2}
    assert kl.kl_coef == 0.2
    kl.end_step({"samples": 250.0, "kl": math.inf})
    assert kl.kl_coef == pytest.approx(0.21, rel=1e-14)


def test_a_fixed_coefficient_stays_and_is_no_state():
    kl = AdaptiveKl(KlConfig(kl_coef=0.2))
    assert kl.end_step({"samples": 250.0, "kl": 60.0}) == {} == kl.state()
    assert kl.kl_coef == 0.2


def test_the_state_goes_on_exactly_in_another_one():
    one, other = AdaptiveKl(ADAPTIVE), AdaptiveKl(ADAPTIVE)
    for measured in (7.1, 5.3, 6.4):
        one.end_step({"kl": measured, "samples": 250.0})
    other.load_state(one.state())
    for measured in (6.2, 5.9):
        assert one.end_step({"kl": measured, "samples": 250.0}) == other.end_step({"kl": measured, "samples": 250.0})
    assert one.state() == other.state() != AdaptiveKl(ADAPTIVE).state()


@pytest.mark.parametrize(
    "state", [{}, {"kl_coef": 0.0}, {"kl_coef": math.nan}, {"kl_coef": "1"}, {"kl_coef": 1.0, "x": 1}]
)
def test_what_is_no_coefficient_is_refused_before_anything_changes(state):
    kl = AdaptiveKl(ADAPTIVE)
    with pytest.raises(ValueError, match="'kl_coef' alone was expected, a number above 0; found"):
        kl.load_state(state)
    assert kl.kl_coef == 0.2
