"""DGPO: numbers by hand, its identities, and which settings it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.dgpo.algorithm import Dgpo, build
from unirl.algorithms.dgpo.config import DgpoConfig
from unirl.algorithms.dgpo.reference import of_group
from unirl.core.errors import BatchError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

LIVE, REFERENCE = [0.010, 0.020, 0.030], [0.014, 0.020, 0.022]
REWARDS = [1.0, 0.5, 0.0]
CENTRED = AdvantageConfig(normalize=False)


def make(advantage: AdvantageConfig = CENTRED, **settings: Any) -> Dgpo:
    config = DgpoConfig(**{"num_points": 1, **settings})
    return build(config, advantage=advantage, reward_weights={"one": 1.0}, train=TrainConfig(), seed=3)


def compared(rewards: list[float], algorithm: Dgpo, **changes: Any) -> Track:
    track = clean_track(torch.zeros(len(rewards), 2))
    track = dataclasses.replace(track, reward_parts={"one": torch.tensor(rewards)}, **changes)
    return algorithm.advantages(track)[0]


def with_errors(live: list[float], reference: list[float], **others: list[float]) -> Velocities:
    """Clean latents are 0 and noise is 0, so that velocities are errors."""
    roots = {"live": live, "reference": reference, **others}
    return Velocities(
        {name: torch.tensor(errors).sqrt()[:, None, None].expand(-1, 1, 2) for name, errors in roots.items()}  # type: ignore[misc]
    )


def loss_of(algorithm: Dgpo, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.zeros(1, 1, 1), sigma=torch.full((1, 1), 0.5))


def test_the_loss_by_hand() -> None:
    """Advantages 0.5, 0 and -0.5; gains 0.004, 0 and -0.008: a margin of 100 / 3 x (0.002 + 0.004) = 0.2."""
    algorithm = make()
    loss = loss_of(algorithm, compared(REWARDS, algorithm), with_errors(LIVE, REFERENCE))
    # Errors are rounded to fp32, 1e-9 of 0.03, and differences of them, times 33, are 0.2.
    assert float(loss) == pytest.approx(math.log1p(math.exp(-0.2)), rel=1e-6)
    assert of_group(100.0, [0.5, 0.0, -0.5], LIVE, REFERENCE) == pytest.approx(math.log1p(math.exp(-0.2)), rel=1e-9)


def test_at_the_reference_the_loss_is_the_logarithm_of_two() -> None:
    algorithm = make()
    loss = loss_of(algorithm, compared(REWARDS, algorithm), with_errors(LIVE, LIVE))
    assert float(loss) == pytest.approx(math.log(2), rel=1e-6)


def test_the_gradient_at_the_reference_is_that_of_weighted_matching() -> None:
    """sigmoid(0) beta / n A_i times that of the error, 2 v / D, in each velocity."""
    algorithm = make(beta=10.0)
    forward = with_errors(LIVE, LIVE)
    live = forward.by_policy["live"].clone().requires_grad_()
    loss_of(algorithm, compared(REWARDS, algorithm), Velocities({**forward.by_policy, "live": live})).backward()
    advantages = torch.tensor([0.5, 0.0, -0.5])[:, None, None]
    torch.testing.assert_close(live.grad, 10.0 / 2 / 3 * advantages * live.detach(), rtol=1e-5, atol=0)


def test_the_moving_reference_is_the_lagged_policy_and_the_pull_stays_with_the_initial_one() -> None:
    """Velocities are roots of errors: 0.1 and 0.2 of the first sample, and equal of the others."""
    algorithm = make(moving_reference=True, kl_coef=0.5)
    forward = with_errors(LIVE, [0.04, *LIVE[1:]], lagged=REFERENCE)
    loss = loss_of(algorithm, compared(REWARDS, algorithm), forward)
    assert float(loss) == pytest.approx(math.log1p(math.exp(-0.2)) + 0.5 * 0.1**2 / 3, rel=1e-6)
    assert [policy for policy, *_ in forward.asked] == ["live", "lagged", "reference"]


def test_a_constant_of_the_prompt_cancels() -> None:
    """As the normalizing constant of the implied rewards does: every gain rises by 0.003. A clip of the advantages at
    0.25, and a selection, leave sums that are not 0."""
    for advantage in (AdvantageConfig(normalize=False, clip=0.25), AdvantageConfig(normalize=False, keep_best=2)):
        algorithm = make(advantage)
        track = compared([1.0, 0.1, 0.3], algorithm)
        rows = [int(name.rsplit("/", 1)[1]) for name in track.sample_ids]
        live, reference = ([errors[row] for row in rows] for errors in (LIVE, REFERENCE))
        plain = loss_of(algorithm, track, with_errors(live, reference))
        shifted = loss_of(algorithm, track, with_errors(live, [error + 0.003 for error in reference]))
        assert track.advantages is not None and abs(float(track.advantages.sum())) > 0.01
        assert float(shifted) == pytest.approx(float(plain), rel=1e-6)


def test_samples_of_weight_0_do_not_count_whatever_they_are() -> None:
    algorithm = make()
    pair = loss_of(algorithm, compared(REWARDS[:2], algorithm), with_errors(LIVE[:2], REFERENCE[:2]))
    track = compared([*REWARDS[:2], math.nan], algorithm, sample_weights=torch.tensor([1.0, 1.0, 0.0]))
    three = loss_of(algorithm, track, with_errors([*LIVE[:2], math.nan], REFERENCE))
    assert float(three) == float(pair)


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.5]])
def test_a_group_of_equal_rewards_or_of_one_gives_no_gradient_and_no_nan(rewards: list[float]) -> None:
    algorithm = make()
    track = compared(rewards, algorithm)
    assert track.sample_weights.tolist() == [0.0] * len(rewards)
    forward = with_errors(LIVE[: len(rewards)], REFERENCE[: len(rewards)])
    live = forward.by_policy["live"].clone().requires_grad_()
    loss = loss_of(algorithm, track, Velocities({**forward.by_policy, "live": live}))
    loss.backward()
    assert float(loss.detach()) == 0.0 and live.grad is not None and not live.grad.any()


def test_the_samples_of_a_prompt_are_noised_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    algorithm = make(num_points=3)
    track = compared(REWARDS, algorithm)
    forward = with_errors([0.1] * 3, [0.1] * 3)
    algorithm.loss(track, forward, progress=0.0)
    for _, x, sigma in forward.asked:
        # Clean latents are 0, so points are sigma times noise.
        assert torch.equal(x, x[:1].expand_as(x)) and torch.equal(sigma, sigma[:1].expand_as(sigma))
        assert float(sigma.min()) >= 0.3


def test_samples_of_two_prompts_are_refused_as_a_group() -> None:
    algorithm = make()
    track = clean_track(torch.zeros(2, 2), advantages=[1.0, -1.0], texts=("p", "q"))
    with pytest.raises(BatchError, match="expected one prompt"):
        algorithm.loss_weights(dataclasses.replace(track, unit_ids=("a", "a")))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["backend.reference_copy=false"], "backend.reference_copy: algorithm 'dgpo' needs a reference policy"),
        (["algorithm.moving_reference=true"], "backend.lagged.kind: got none, but algorithm 'dgpo' trains on samples"),
        (["data.samples_per_prompt=1"], "data.samples_per_prompt: got 1, so every group has zero variance"),
        (
            ["data.samples_per_prompt=1", "advantage.center=global"],
            "data.samples_per_prompt: got 1, expected 2 or more: algorithm 'dgpo' compares samples",
        ),
        (
            ["advantage.keep_worst=1"],
            "advantage.keep_worst: got 1, which keeps one sample of a group; algorithm 'dgpo'",
        ),
        (["train.micro_batch_size=8"], "train.micro_batch_size: got 8, expected 0 or at least 12: algorithm 'dgpo'"),
        (
            ["data.prompts_per_step=2", "train.updates_per_step=3"],
            "train.updates_per_step: got 3, expected at most 2, the groups of a rollout: algorithm 'dgpo' never splits",
        ),
        (
            ["advantage.positive_factor=shapes"],
            "advantage.positive_factor: got 'shapes', expected none: algorithm 'dgpo'",
        ),
        (["algorithm.point_range=[0.5,0.5]"], "algorithm.point_range: got [0.5, 0.5], expected two rising"),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-dgpo", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)
