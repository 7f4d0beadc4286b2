"""AlignProp against finite differences in fp64 of a sampler in NumPy, which shares no code with it."""

from __future__ import annotations

from typing import Any

import pytest
from unirl.algorithms.alignprop.algorithm import Alignprop, build
from unirl.algorithms.alignprop.config import AlignpropConfig
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


def make(**settings: Any) -> Alignprop:
    return build(
        AlignpropConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": 1.0},
        train=TrainConfig(),
        seed=3,
        score=smooth_score,
    )


def expected_slopes(track: Any) -> list[Any]:
    """Gradients through the last 1, 2, ... steps, and through their inputs."""

    def loss(count: int, weights: Any) -> float:
        x = track.latent.latents[:, STEPS - count].double().numpy()
        for step in range(STEPS - count, STEPS):
            x = x + (SIGMAS[step + 1] - SIGMAS[step]) * velocity(weights, x, SIGMAS[step])
        return -mean_reward(x)

    return [slope(lambda weights, count=count: loss(count, weights)) for count in range(1, STEPS + 1)]


def test_a_fixed_number_of_steps_has_the_gradient_of_those_steps() -> None:
    track = stored_track()
    for count, expected in enumerate(expected_slopes(track), start=1):
        assert gradient_of(make(gradient_steps=count), track) == pytest.approx(expected, **CLOSE), count


@pytest.mark.parametrize("most", [0, 3])
def test_the_number_of_steps_is_drawn_evenly_for_each_training_step(most: int) -> None:
    track, algorithm = stored_track(), make(max_gradient_steps=most)
    expected = expected_slopes(track)[: most or STEPS]
    counts = [0] * len(expected)
    for number in range(150):
        result = gradient_of(algorithm, stored_track(version=number))
        fits = [result == pytest.approx(each, **CLOSE) for each in expected]
        assert sum(fits) == 1
        counts[fits.index(True)] += 1
    # Binomial: a standard deviation of at most 5.8, and 5 of them.
    assert all(abs(count - 150 / len(expected)) < 29 for count in counts), counts


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.max_gradient_steps=11"], "algorithm.max_gradient_steps: got 11 steps; expected at most"),
        (
            ["algorithm.gradient_steps=2"],
            "algorithm.max_gradient_steps: got 5 with gradient_steps=2, which is not drawn",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-alignprop", overrides, catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    assert any(reason.startswith(says) for reason in reasons), reasons
