"""EPG, PEPG and PAR: numbers by hand, the gradients of the paper, and which settings are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.epg.algorithm import Epg, build
from unirl.algorithms.epg.config import EpgConfig
from unirl.algorithms.epg.reference import of_ratio
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
LOG_RATIO = 10 * (OLD_ERROR - LIVE_ERROR)
RATIO = math.exp(LOG_RATIO)
FORMS = ("epg", "pepg", "par")


def make(**settings: Any) -> Epg:
    config = EpgConfig(**{"num_points": 1, "weighting": "uniform", "elbo_scale": 10.0, **settings})
    return build(config, advantage=AdvantageConfig(), reward_weights={"one": 1.0}, train=TrainConfig(), seed=3)


def loss_of(algorithm: Epg, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture
def at_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.tensor([[NOISE]]), sigma=torch.tensor([[SIGMA]]))


def anchored(algorithm: Epg, advantage: float, old: Any = OLD) -> Track:
    track = clean_track(torch.tensor([CLEAN]), advantages=[advantage])
    return algorithm.with_old_log_probs(track, Velocities({"live": torch.tensor(old)}))


def gradient_of(algorithm: Epg, track: Track, at: Any) -> Tensor:
    live = torch.tensor(at, requires_grad=True)
    loss_of(algorithm, track, Velocities({"live": live})).backward()
    assert live.grad is not None
    return live.grad


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("epg", -1.5 * RATIO),
        ("pepg", -1.5 * RATIO + RATIO * LOG_RATIO - RATIO + 1),
        ("par", 0.5 * RATIO * (1.5 - LOG_RATIO) ** 2),
    ],
)
def test_the_losses_by_hand(form: str, expected: float) -> None:
    algorithm = make(form=form)
    loss = loss_of(algorithm, anchored(algorithm, 1.5), Velocities({"live": torch.tensor(LIVE)}))
    # fp32 velocities, squared and times ten.
    assert float(loss) == pytest.approx(expected, rel=2e-6)
    assert of_ratio(form, 1.5, LOG_RATIO, fixed=LOG_RATIO) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("form", "pull"), [("epg", 0.0), ("pepg", LOG_RATIO), ("par", LOG_RATIO)])
def test_the_gradients_are_those_of_the_paper(form: str, pull: float, advantage: float) -> None:
    """-r (A - log r) times that of the log-prob, -10 x 2 (v - v*) / D; EPG without the log-ratio."""
    algorithm = make(form=form)
    result = gradient_of(algorithm, anchored(algorithm, advantage), LIVE)
    expected = RATIO * (advantage - pull) * 10 * (torch.tensor(LIVE) - torch.tensor(TARGET))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighting", ["uniform", "adaptive"])
def test_at_the_policy_that_sampled_ratios_are_1_and_all_forms_have_one_gradient(form: str, weighting: str) -> None:
    algorithm = make(form=form, weighting=weighting)
    track = anchored(algorithm, 2.0, LIVE)
    losses = algorithm.loss(track, Velocities({"live": torch.tensor(LIVE)}), progress=0.0)
    ratio = losses.metrics["ratio_max_dev"]
    assert float(ratio.total) == 0.0
    assert float(losses.terms[0].values) == {"epg": -2.0, "pepg": -2.0, "par": 2.0}[form]
    other = make(form="epg", weighting=weighting)
    torch.testing.assert_close(gradient_of(algorithm, track, LIVE), gradient_of(other, track, LIVE), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("form", ["pepg", "par"])
def test_the_penalty_stops_a_sample_whose_log_ratio_is_its_advantage(form: str) -> None:
    """And turns one round that is beyond it."""
    algorithm = make(form=form)
    assert float(gradient_of(algorithm, anchored(algorithm, LOG_RATIO), LIVE).abs().max()) < 1e-6
    towards = LIVE[0] - TARGET[0]
    assert float(gradient_of(algorithm, anchored(algorithm, 0.1), LIVE)[0]) * towards < 0


@pytest.mark.usefixtures("at_the_point")
def test_the_adaptive_weight_is_the_level_over_the_mean_absolute_error() -> None:
    """Mean absolute errors of (0.3, -0.25) and (0.2, -0.15)."""
    algorithm = make(form="epg", weighting="adaptive")
    loss = loss_of(algorithm, anchored(algorithm, 1.0), Velocities({"live": torch.tensor(LIVE)}))
    assert float(loss) == pytest.approx(-math.exp(10 * SIGMA * (OLD_ERROR / 0.275 - LIVE_ERROR / 0.175)), rel=2e-6)


def test_a_ratio_over_samples_takes_the_mean_elbo_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.tensor([[NOISE, NOISE]]), sigma=torch.tensor([[0.2, SIGMA]]))
    algorithm = make(form="epg", num_points=2, ratio_over="sample", weighting="adaptive")
    loss = loss_of(algorithm, anchored(algorithm, 1.0), Velocities({"live": torch.tensor(LIVE)}))
    # Not the mean of two exponentials, which is larger by 4e-3.
    assert float(loss) == pytest.approx(-math.exp(10 * 0.4 * (OLD_ERROR / 0.275 - LIVE_ERROR / 0.175)), rel=2e-6)


@pytest.mark.usefixtures("at_the_point")
def test_the_penalty_on_the_initial_policy_is_a_squared_distance() -> None:
    algorithm = make(form="epg", kl_coef=3.0)
    velocities = {"live": torch.tensor(LIVE), "reference": torch.tensor((0.1, 1.0))}
    loss = loss_of(algorithm, anchored(algorithm, 1.0), Velocities(velocities))
    assert float(loss) == pytest.approx(-RATIO + 3.0 * (0.4**2 + 0.1**2) / 2, rel=2e-6)


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("far", [(1e3, 1e3), (-0.5, 1.25)])
def test_ratios_out_of_range_give_finite_losses_and_no_gradient(form: str, far: Any) -> None:
    """Log-ratios of -1e9 and of 1,525."""
    algorithm = make(form=form, elbo_scale=2e4)
    track = anchored(algorithm, 1.0)
    loss = loss_of(algorithm, track, Velocities({"live": torch.tensor(far)}))
    assert math.isfinite(float(loss)) and not gradient_of(algorithm, track, far).any()


@pytest.mark.usefixtures("at_the_point")
@pytest.mark.parametrize("form", FORMS)
def test_advantages_of_0_give_no_gradient_at_the_first_update(form: str) -> None:
    algorithm = make(form=form)
    assert not gradient_of(algorithm, anchored(algorithm, 0.0, LIVE), LIVE).any()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sampling.guidance_scale=2"], "sampling.guidance_scale: got 2.0, expected 1"),
        (["algorithm.kl_coef=0.1"], "backend.reference_copy: algorithm 'epg' needs a reference policy"),
        (["data.samples_per_prompt=1"], "data.samples_per_prompt: got 1, so every group has zero variance"),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-epg", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)
