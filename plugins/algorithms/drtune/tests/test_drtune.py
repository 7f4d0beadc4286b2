"""DRTune against finite differences in fp64 of a sampler in NumPy, which shares no code with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unirl.algorithms.drtune.algorithm import Drtune, build
from unirl.algorithms.drtune.config import DrtuneConfig
from unirl.conformance.doubles.smooth_sampler import (
    CLOSE,
    SIGMAS,
    STEPS,
    WEIGHTS,
    SmoothModel,
    gradient_of,
    loss_of,
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
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import spread_steps


def make(replay: str = "stacked", **settings: Any) -> Drtune:
    return build(
        DrtuneConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"target": 1.0},
        train=TrainConfig(replay=replay),
        seed=3,
        score=smooth_score,
    )


def expected_slope(track: Track, chosen: set[int], stop: int = STEPS - 1) -> Any:
    """The velocities at the chosen steps move with the weights, all at the stored inputs."""
    stored = track.latent.latents.double().numpy()

    def loss(weights: Any) -> float:
        x = stored[:, min(chosen)]
        for step in range(min(chosen), stop + 1):
            v = velocity(weights if step in chosen else WEIGHTS, stored[:, step], SIGMAS[step])
            after = 0.0 if step == stop else SIGMAS[step + 1]
            x = x + (after - SIGMAS[step]) * v
        return -mean_reward(x)

    return slope(loss)


@pytest.mark.parametrize("replay", ["stacked", "serial"])
@pytest.mark.parametrize("count", [1, 2, STEPS])
def test_the_gradient_is_the_sum_of_those_of_spread_steps(count: int, replay: str) -> None:
    track, algorithm = stored_track(), make(gradient_steps=count, replay=replay)
    candidates = {tuple(spread_steps(count, num_steps=STEPS, offset=at / 50)) for at in range(50)}
    seen = set()
    for version in range(4):
        result = gradient_of(algorithm, stored_track(version=version))
        fits = [c for c in candidates if result == pytest.approx(expected_slope(track, set(c)), **CLOSE)]
        assert len(fits) == 1
        seen.update(fits)
    assert count == STEPS or len(seen) > 1


def test_an_early_stop_jumps_to_the_clean_estimate() -> None:
    """With a gradient at every step there is one candidate for each stop, and both of two are drawn."""
    track, algorithm = stored_track(), make(gradient_steps=STEPS - 1, stop_window=2)
    early = {"early": expected_slope(track, set(range(STEPS - 1)), STEPS - 2)}
    late = {
        str(c): expected_slope(track, set(c))
        for c in {tuple(spread_steps(STEPS - 1, num_steps=STEPS, offset=at / 50)) for at in range(50)}
    }
    names = []
    for number in range(12):
        result = gradient_of(algorithm, stored_track(version=number))
        names += [name for name, each in {**early, **late}.items() if result == pytest.approx(each, **CLOSE)]
    assert len(names) == 12 and "early" in names and set(names) != {"early"}


def test_forwards_are_as_many_as_gradient_steps_wherever_they_lie() -> None:
    """Stored latents need no forward between a gradient step and the end."""
    track = stored_track()
    for replay, expected in (("stacked", [2 * 3]), ("serial", [3, 3])):
        model = SmoothModel()
        loss_of(make(gradient_steps=2, replay=replay, checkpointing=False), track, model)
        assert model.batch_sizes == expected


def test_spread_steps_are_distinct_and_equally_likely() -> None:
    for num_steps, count in ((10, 3), (50, 5), (7, 7), (5, 1)):
        drawn = [spread_steps(count, num_steps=num_steps, offset=at / 700) for at in range(700)]
        assert all(len(set(each)) == count and max(each) < num_steps for each in drawn)
        often = np.bincount(np.array(drawn).ravel(), minlength=num_steps)
        # 700 offsets of equal distance: each step has its share up to one at either end.
        assert np.abs(often - 700 * count / num_steps).max() <= 2 * count


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.gradient_steps=9"],
            "algorithm.gradient_steps: got 9 with stop_window=3 steps, which reach back 11",
        ),
        (["reward.shapes.weight=1"], "reward.shapes: algorithm 'drtune' needs 'reward-differentiable'"),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-drtune", overrides, catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    assert any(reason.startswith(says) for reason in reasons), reasons
