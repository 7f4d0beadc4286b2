"""CRD: numbers by hand, its limits, and which settings it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.crd.algorithm import Crd, build
from unirl.algorithms.crd.config import CrdConfig
from unirl.algorithms.crd.reference import of_group
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

LIVE, REFERENCE = [0.010, 0.020, 0.030], [0.014, 0.020, 0.022]
REWARDS = [1.0, 0.5, 0.0]
SIGMA = 0.5


def make(**settings: Any) -> Crd:
    config = CrdConfig(**{"num_points": 1, "weighting": "uniform", **settings})
    advantage = AdvantageConfig(normalize=False)
    return build(config, advantage=advantage, reward_weights={"one": 1.0}, train=TrainConfig(), seed=3)


def compared(rewards: list[float], algorithm: Crd, **changes: Any) -> Track:
    track = clean_track(torch.zeros(len(rewards), 2))
    track = dataclasses.replace(track, reward_parts={"one": torch.tensor(rewards)}, **changes)
    return algorithm.advantages(track)[0]


def with_errors(**errors: list[float]) -> Velocities:
    """Clean latents are 0 and noise is 0, so that velocities are errors."""
    return Velocities(
        {name: torch.tensor(of).sqrt()[:, None, None].expand(-1, 1, 2) for name, of in errors.items()}  # type: ignore[misc]
    )


def loss_of(algorithm: Crd, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.zeros(1, 1, 1), sigma=torch.full((1, 1), SIGMA))


def test_the_loss_by_hand() -> None:
    """Gains 0.004, 0 and -0.008, times 30, are 0.12, 0 and -0.24; centred 0.16, 0.04 and -0.2; rewards 0.5, 0, -0.5."""
    expected = (0.34**2 + 0.04**2 + 0.3**2) / 3
    algorithm = make(beta=30.0)
    loss = loss_of(algorithm, compared(REWARDS, algorithm), with_errors(live=LIVE, reference=REFERENCE))
    # Errors are rounded to fp32, 1e-9 of 0.03, and differences of them, times 30, are 0.1.
    assert float(loss) == pytest.approx(expected, rel=2e-6)
    squares = of_group(30.0, REWARDS, [0.004, 0.0, -0.008])
    assert sum(squares) / 3 == pytest.approx(expected, rel=1e-9)


def test_at_the_reference_it_is_regression_on_centred_rewards() -> None:
    """The loss is their variance, and the gradient -2 beta A_i times that of the ELBO, -2 v / D."""
    algorithm = make(beta=30.0)
    forward = with_errors(live=LIVE, reference=LIVE)
    live = forward.by_policy["live"].clone().requires_grad_()
    loss = loss_of(algorithm, compared(REWARDS, algorithm), Velocities({**forward.by_policy, "live": live}))
    loss.backward()
    assert float(loss.detach()) == pytest.approx((0.25 + 0.25) / 3, rel=1e-6)
    advantages = torch.tensor([0.5, 0.0, -0.5])[:, None, None]
    torch.testing.assert_close(live.grad, 2 * 30.0 * advantages * live.detach() / 3, rtol=1e-5, atol=0)


def test_where_implied_rewards_are_the_rewards_the_loss_is_0() -> None:
    """A constant of the prompt included, here 0.02: the normalizing constant cancels."""
    live = [0.010, 0.020, 0.030]
    reference = [error + 0.02 + reward / 100 for error, reward in zip(live, REWARDS, strict=True)]
    algorithm = make(beta=100.0)
    losses = algorithm.loss(compared(REWARDS, algorithm), with_errors(live=live, reference=reference), progress=0.0)
    # fp32 errors of 1e-9, times 100.
    assert float(losses.terms[0].values.max()) < 1e-12
    fitted = losses.metrics["fitted"]
    assert float(fitted.total) / float(fitted.weight) == pytest.approx(1.0, rel=1e-5)


def test_the_adaptive_weight_divides_errors_by_their_size() -> None:
    """Of the clean estimate: sigma^2 e / (sigma sqrt(e)) here, where both elements have the same error."""
    algorithm = make(beta=1.0, weighting="adaptive")
    loss = loss_of(algorithm, compared(REWARDS, algorithm), with_errors(live=LIVE, reference=REFERENCE))
    gains = [SIGMA * (b**0.5 - a**0.5) for a, b in zip(LIVE, REFERENCE, strict=True)]
    assert float(loss) == pytest.approx(sum(of_group(1.0, REWARDS, gains)) / 3, rel=1e-6)


def test_the_moving_reference_is_the_lagged_policy_and_the_pull_stays_with_the_initial_one() -> None:
    """Velocities are roots of errors: 0.1 and 0.2 of the first sample, and equal of the others."""
    algorithm = make(beta=30.0, moving_reference=True, kl_coef=0.5)
    forward = with_errors(live=LIVE, lagged=REFERENCE, reference=[0.04, *LIVE[1:]])
    loss = loss_of(algorithm, compared(REWARDS, algorithm), forward)
    expected = (0.34**2 + 0.04**2 + 0.3**2) / 3 + 0.5 * 0.1**2 / 3
    assert float(loss) == pytest.approx(expected, rel=2e-6)
    assert [policy for policy, *_ in forward.asked] == ["live", "lagged", "reference"]


def test_samples_of_weight_0_do_not_count_whatever_they_are() -> None:
    algorithm = make()
    pair = loss_of(algorithm, compared(REWARDS[:2], algorithm), with_errors(live=LIVE[:2], reference=REFERENCE[:2]))
    track = compared([*REWARDS[:2], math.nan], algorithm, sample_weights=torch.tensor([1.0, 1.0, 0.0]))
    three = loss_of(algorithm, track, with_errors(live=[*LIVE[:2], math.nan], reference=REFERENCE))
    assert float(three) == float(pair)


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.5]])
def test_a_group_of_equal_rewards_or_of_one_gives_no_gradient_and_no_nan(rewards: list[float]) -> None:
    algorithm = make()
    track = compared(rewards, algorithm)
    forward = with_errors(live=LIVE[: len(rewards)], reference=REFERENCE[: len(rewards)])
    live = forward.by_policy["live"].clone().requires_grad_()
    loss = loss_of(algorithm, track, Velocities({**forward.by_policy, "live": live}))
    loss.backward()
    assert float(loss.detach()) == 0.0 and live.grad is not None and not live.grad.any()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["backend.reference_copy=false"], "backend.reference_copy: algorithm 'crd' needs a reference policy"),
        (["algorithm.moving_reference=true"], "backend.lagged.kind: got none, but algorithm 'crd' trains on samples"),
        (["data.samples_per_prompt=1"], "data.samples_per_prompt: got 1, so every group has zero variance"),
        (
            ["data.samples_per_prompt=1", "advantage.center=global"],
            "data.samples_per_prompt: got 1, expected 2 or more: algorithm 'crd' compares samples",
        ),
        (["train.micro_batch_size=8"], "train.micro_batch_size: got 8, expected 0 or at least 12: algorithm 'crd'"),
        (
            ["advantage.positive_factor=shapes"],
            "advantage.positive_factor: got 'shapes', expected none: algorithm 'crd'",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-crd", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)
