"""Advantage weighted matching: its log-probs and ratios by hand, its gradient by that of pretraining."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.awm.algorithm import Awm, build
from unirl.algorithms.awm.config import AwmConfig
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

CLEAN, NOISE, SIGMA = (1.0, -1.0), (0.5, 0.25), 0.6
TARGET = (-0.5, 1.25)  # noise - clean
OLD, LIVE = (-0.2, 1.0), (-0.3, 1.1)
# Mean squares of (0.3, -0.25) and of (0.2, -0.15).
OLD_ERROR, LIVE_ERROR = 0.07625, 0.03125


def make(**settings: Any) -> Awm:
    return build(
        AwmConfig(**{"num_points": 1, "clip_range": 0.5, **settings}),
        advantage=AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
        seed=3,
    )


def loss_of(algorithm: Awm, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture
def at_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.tensor([[NOISE]]), sigma=torch.tensor([[SIGMA]]))


def anchored(algorithm: Awm, advantage: float, old: Any = OLD, *, policy: Any = "live") -> Track:
    track = clean_track(torch.tensor([CLEAN]), advantages=[advantage])
    return algorithm.with_old_log_probs(track, Velocities({policy: torch.tensor(old)}))


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize(
    ("weighting", "log_ratio"),
    [
        ("uniform", OLD_ERROR - LIVE_ERROR),
        ("t", SIGMA * (OLD_ERROR - LIVE_ERROR)),
        ("t2", SIGMA**2 * (OLD_ERROR - LIVE_ERROR)),
        ("huber", SIGMA * (OLD_ERROR**0.5 - LIVE_ERROR**0.5)),
        ("ghuber", SIGMA / 0.25 * (OLD_ERROR**0.25 - LIVE_ERROR**0.25)),
    ],
)
def test_the_negative_matching_error_takes_the_place_of_the_log_prob(weighting: str, log_ratio: float) -> None:
    algorithm = make(weighting=weighting, scale=2.0)
    loss = loss_of(algorithm, anchored(algorithm, 1.5), Velocities({"live": torch.tensor(LIVE)}))
    # The published code adds 1e-10 to errors of 0.03: a part in 1e8 of the log-prob. The rest is fp32.
    assert float(loss) == pytest.approx(-2.0 * 1.5 * math.exp(log_ratio), rel=1e-6)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize(("advantage", "expected"), [(2.0, -2.0 * 1.01), (-2.0, 2.0 * math.exp(0.045))])
def test_the_ratio_is_clipped_where_it_moved_with_its_advantage(advantage: float, expected: float) -> None:
    algorithm = make(clip_range=0.01)
    loss = loss_of(algorithm, anchored(algorithm, advantage), Velocities({"live": torch.tensor(LIVE)}))
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("advantage", [1.0, -3.0])
@pytest.mark.parametrize("ratio_over", ["point", "sample"])
def test_the_first_gradient_is_that_of_pretraining_times_the_advantage(advantage: float, ratio_over: str) -> None:
    """A 2 (v - v*) / D: with an advantage of 1 flow matching itself."""
    algorithm = make(ratio_over=ratio_over)
    live = torch.tensor(LIVE, requires_grad=True)
    loss = loss_of(algorithm, anchored(algorithm, advantage, LIVE), Velocities({"live": live}))
    assert float(loss.detach()) == -advantage
    loss.backward()
    expected = advantage * 2 * (live.detach() - torch.tensor(TARGET)) / 2
    torch.testing.assert_close(live.grad, expected, rtol=1e-6, atol=0)


def test_a_ratio_over_samples_takes_the_mean_log_prob_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.tensor([[NOISE, NOISE]]), sigma=torch.tensor([[0.2, SIGMA]]))
    algorithm = make(num_points=2, ratio_over="sample", weighting="t")
    loss = loss_of(algorithm, anchored(algorithm, 1.0), Velocities({"live": torch.tensor(LIVE)}))
    # Not the mean of exp(0.2 d) and exp(0.6 d), which is larger by 4e-4.
    assert float(loss) == pytest.approx(-math.exp(0.4 * (OLD_ERROR - LIVE_ERROR)), rel=1e-6)


@pytest.mark.usefixtures("at_the_point")
def test_the_pulls_are_squared_distances_to_the_other_policies() -> None:
    """And with a pull to the lagged policy, which then samples, the ratio is to that policy."""
    algorithm = make(kl_coef=3.0, lagged_coef=0.5)
    reference = (0.1, 1.0)
    track = anchored(algorithm, 1.0, policy="lagged")
    velocities = {"live": torch.tensor(LIVE), "lagged": torch.tensor(OLD), "reference": torch.tensor(reference)}
    loss = loss_of(algorithm, track, Velocities(velocities))
    expected = -math.exp(OLD_ERROR - LIVE_ERROR) + 3.0 * (0.4**2 + 0.1**2) / 2 + 0.5 * (0.1**2 + 0.1**2) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sampling.guidance_scale=2"], "sampling.guidance_scale: got 2.0, expected 1"),
        (["algorithm.point_range=[0.5,0.5]"], "algorithm.point_range: got [0.5, 0.5], expected two rising"),
        (["algorithm.kl_coef=0.1"], "backend.reference_copy: algorithm 'awm' needs a reference policy"),
        (["algorithm.lagged_coef=1"], "backend.lagged.kind: got none, but algorithm 'awm' trains on samples"),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-awm", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)
