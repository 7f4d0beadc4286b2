"""ReFL against finite differences in fp64 of a sampler in NumPy, which shares no code with it."""

from __future__ import annotations

from typing import Any

import pytest
from unirl.algorithms.refl.algorithm import Refl, build
from unirl.algorithms.refl.config import ReflConfig
from unirl.conformance.doubles.smooth_sampler import (
    CLOSE,
    SIGMAS,
    STEPS,
    gradient_of,
    mean_reward,
    slope,
    smooth_score,
    stored_track,
    velocity,
)
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig


def make(**settings: Any) -> Refl:
    return build(
        ReflConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": 1.0},
        train=TrainConfig(),
        seed=3,
        score=smooth_score,
    )


def test_the_gradient_is_that_of_one_jump_from_a_step_that_training_steps_draw_evenly() -> None:
    """x0 = x_k - sigma_k v(x_k, sigma_k), with x_k a constant, at one k for all samples."""
    track, algorithm = stored_track(), make(stop_window=STEPS)
    stored = track.latent.latents.double().numpy()

    def jump(step: int, weights: Any) -> float:
        x = stored[:, step]
        return -mean_reward(x - SIGMAS[step] * velocity(weights, x, SIGMAS[step]))

    expected = [slope(lambda weights, step=step: jump(step, weights)) for step in range(STEPS)]
    counts = [0] * STEPS
    for number in range(200):
        result = gradient_of(algorithm, stored_track(version=number))
        fits = [result == pytest.approx(each, **CLOSE) for each in expected]
        assert sum(fits) == 1
        counts[fits.index(True)] += 1
    # Binomial with 200 draws of 1 in 5: a standard deviation of 5.7, and 5 of them.
    assert all(abs(count - 40) < 29 for count in counts), counts


def test_all_micro_batches_of_a_step_stop_at_one_step() -> None:
    algorithm = make(stop_window=STEPS)
    for version in range(3):
        track = stored_track(version=version)
        alone = [gradient_of(algorithm, track.select([row])) for row in range(3)]
        # Sums of three in another order.
        assert sum(alone) / 3 == pytest.approx(gradient_of(algorithm, track), rel=1e-5, abs=1e-8)


def test_samples_beyond_the_hinge_have_no_gradient() -> None:
    """ReFL's loss map, max(2 - R, 0): rewards of the double are below 1, and below 2 it is linear."""
    track = stored_track()
    plain, hinged = (
        gradient_of(make(**settings), track) for settings in ({}, {"reward_loss": "hinge", "reward_target": 2.0})
    )
    assert plain == pytest.approx(hinged, **CLOSE)
    assert abs(gradient_of(make(reward_loss="hinge", reward_target=-2.0), track)).max() == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.stop_window=11"],
            "algorithm.stop_window: got 11 steps; expected at most sampling.num_inference_steps=10",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-refl", overrides, catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    assert any(reason.startswith(says) for reason in reasons), reasons
