"""Diffusion-DPO: golden vectors, its identities, and which samples make a pair."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.diffusion_dpo.algorithm import DiffusionDpo, build
from unirl.algorithms.diffusion_dpo.config import DiffusionDpoConfig
from unirl.algorithms.diffusion_dpo.reference import of_errors
from unirl.core.errors import BatchError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

RANKS = ("launcher=ray", "launcher.train_ranks=4")
FEW = ("data.prompts_per_step=2", "data.samples_per_prompt=4")
WINNER, WINNER_REFERENCE, LOSER, LOSER_REFERENCE = 0.010, 0.012, 0.020, 0.019


def make(**settings: Any) -> DiffusionDpo:
    return build(
        DiffusionDpoConfig(**{"num_points": 1, "beta": 5000.0, **settings}),
        advantage=AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
        seed=3,
    )


def paired(rewards: list[float], algorithm: DiffusionDpo, **changes: Any) -> Track:
    track = clean_track(torch.zeros(len(rewards), 2))
    track = dataclasses.replace(track, reward_parts={"one": torch.tensor(rewards)}, **changes)
    return algorithm.advantages(track)[0]


def with_errors(live: list[float], reference: list[float]) -> Velocities:
    """Clean latents are 0 and noise is 0, so that velocities are errors."""
    roots = {"live": live, "reference": reference}
    return Velocities({name: torch.tensor(errors).sqrt()[:, None, None] for name, errors in roots.items()})  # type: ignore[misc]


def loss_of(algorithm: DiffusionDpo, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    at_points(monkeypatch, noise=torch.zeros(1, 1, 1), sigma=torch.full((1, 1), 0.5))


def test_golden_vectors() -> None:
    """Computed in fp64 from the formula, independently of this code; the reference for conformance gives them too."""
    algorithm = make()
    track = paired([1.0, 0.0], algorithm)
    loss = loss_of(algorithm, track, with_errors([WINNER, LOSER], [WINNER_REFERENCE, LOSER_REFERENCE]))
    # Errors are rounded to fp32, 1e-9 of 0.02, and differences of them times beta / 2 = 2500 are 7.5.
    assert float(loss) == pytest.approx(0.000552931475, rel=2e-5)
    reference = of_errors(5000.0, WINNER, WINNER_REFERENCE, LOSER, LOSER_REFERENCE)
    assert reference == pytest.approx(0.000552931475, rel=1e-6)


def test_at_the_reference_the_loss_is_the_logarithm_of_two() -> None:
    algorithm = make()
    track = paired([0.0, 1.0], algorithm)
    loss = loss_of(algorithm, track, with_errors([WINNER, LOSER], [WINNER, LOSER]))
    assert float(loss) == pytest.approx(math.log(2), rel=1e-6)


def test_the_other_preference_costs_the_margin_more() -> None:
    """L(w, l) - L(l, w) = -z, with z = 7.5 here."""
    algorithm = make()
    forward = with_errors([WINNER, LOSER], [WINNER_REFERENCE, LOSER_REFERENCE])
    one, other = (loss_of(algorithm, paired(rewards, algorithm), forward) for rewards in ([1.0, 0.0], [0.0, 1.0]))
    assert float(one - other) == pytest.approx(-7.5, rel=1e-5)


def test_best_and_worst_are_a_unit_and_the_others_weigh_nothing() -> None:
    track = paired([0.2, 0.9, 0.5, 0.1], make())
    assert [sorted(rows) for rows in track.units() if len(rows) == 2] == [[1, 3]]
    assert track.sample_weights.tolist() == [0.0, 1.0, 0.0, 1.0]
    # Of five, the one in the middle stays alone; of two equal ones that is the one with the smaller id.
    two = paired([0.2, 0.9, 0.5, 0.1, 0.5], make(pairs_per_group=3))
    assert [rows for rows in two.units() if len(rows) == 2] == [[0, 4], [1, 3]]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
def test_a_group_without_a_best_has_no_pair(weights: list[float]) -> None:
    algorithm = make()
    track = clean_track(torch.zeros(3, 2))
    rewards = [0.5, 0.5, 0.5] if weights[1] else [0.1, 0.5, 0.9]
    track = dataclasses.replace(
        track, reward_parts={"one": torch.tensor(rewards)}, sample_weights=torch.tensor(weights)
    )
    track, numbers = algorithm.advantages(track)
    assert (numbers["pairs"], numbers["groups_without_pair"]) == (0.0, 1.0)
    assert float(algorithm.loss_weights(track)["policy"].sum()) == 0.0


def test_both_samples_of_a_pair_are_noised_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    algorithm = make(num_points=3)
    track = paired([1.0, 0.5, 0.0], algorithm)
    forward = with_errors([0.1] * 3, [0.1] * 3)
    algorithm.loss(track, forward, progress=0.0)
    for _, x, sigma in forward.asked:
        # Clean latents are 0, so points are sigma times noise.
        assert torch.equal(x[0], x[2]) and torch.equal(sigma[0], sigma[2])
        assert not torch.equal(x[0], x[1])


@pytest.mark.parametrize(
    ("units", "texts", "says"),
    [
        (("a", "a", "a"), ("p", "p", "p"), "expected two: a winner and a loser"),
        (("a", "a", "b"), ("p", "q", "q"), "expected one prompt"),
    ],
)
def test_three_sides_and_unequal_prompts_are_refused(units: tuple[str, ...], texts: Any, says: str) -> None:
    track = clean_track(torch.zeros(3, 2), advantages=[1.0, 0.0, -1.0], texts=texts)
    with pytest.raises(BatchError, match=says):
        make().loss_weights(dataclasses.replace(track, unit_ids=units))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["backend.reference_copy=false"],
            "backend.reference_copy: algorithm 'diffusion-dpo' needs a reference policy",
        ),
        (["train.micro_batch_size=1"], "train.micro_batch_size: got 1, expected 0 or at least 2: algorithm"),
        (
            [*FEW, "algorithm.pairs_per_group=1", "train.updates_per_step=3"],
            "train.updates_per_step: got 3, expected at most 2, the pairs of a rollout: algorithm 'diffusion-dpo' never",
        ),
        (
            [*RANKS, "data.prompts_per_step=8", "algorithm.pairs_per_group=2", "train.updates_per_step=5"],
            "train.updates_per_step: got 5, expected at most 4, the pairs of a rollout on one of 4 train ranks:",
        ),
        (
            [*RANKS, *FEW, "train.updates_per_step=3"],
            "train.updates_per_step: got 3, expected at most 2, the samples of a rollout on one of 4 train ranks (data",
        ),
        (["advantage.keep_best=1"], "advantage.keep_best: got 1, which keeps one sample of a group"),
        (
            ["data.samples_per_prompt=1", "advantage.center=global", "advantage.scope=global"],
            "data.samples_per_prompt: got 1, expected 2 or more: algorithm 'diffusion-dpo' compares",
        ),
    ],
)
def test_settings_that_leave_nothing_to_compare_with_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose("quickstart-dpo", overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)
