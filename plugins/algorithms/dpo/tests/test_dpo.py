"""DPO: golden vectors, its identities, and which completions make a pair."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from token_algorithms.given import GivenReplay, reduced, track_of
from unirl.algorithms.dpo.algorithm import Dpo, build
from unirl.algorithms.dpo.config import DpoConfig
from unirl.algorithms.dpo.reference import loss as reference_loss
from unirl.conformance.reference import TokenLossInputs
from unirl.core.errors import BatchError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Track

LENGTHS = (3, 5)


def make(**settings: Any) -> Dpo:
    return build(
        DpoConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
        seed=3,
    )


def given(seed: int = 0, **changed: Any) -> TokenLossInputs:
    """A winner of three tokens and a loser of five."""
    rng = np.random.default_rng(seed)
    valid = np.arange(5)[None] < np.array(LENGTHS)[:, None]
    # A completion ends after its last token that counts; that of the first row is the longest here.
    numbers: dict[str, Any] = {
        "log_probs": rng.normal(-1.5, 0.6, valid.shape),
        "old_log_probs": np.zeros(valid.shape),
        "engine_log_probs": np.zeros(valid.shape),
        "reference_log_probs": rng.normal(-1.5, 0.6, valid.shape),
        "entropy": np.zeros(valid.shape),
        "valid": valid,
        "advantages": np.array([1.0, -1.0]),
        "weights": np.ones(2),
        "is_truncated": np.zeros(2, dtype=bool),
        "units": ((0, 1),),
    }
    return TokenLossInputs(**{**numbers, **changed})


def pair_of(inputs: TokenLossInputs) -> Track:
    return dataclasses.replace(track_of(inputs), unit_ids=("pair",) * 2)


def loss_of(algorithm: Dpo, inputs: TokenLossInputs) -> float:
    track = pair_of(inputs)
    losses = algorithm.loss(track, GivenReplay(inputs), progress=0.0)  # type: ignore[arg-type]
    return reduced(losses, algorithm.loss_weights(track))


def gains(inputs: TokenLossInputs) -> tuple[float, float]:
    difference = np.where(inputs.valid, inputs.log_probs - inputs.reference_log_probs, 0).sum(axis=1)
    return float(difference[0]), float(difference[1])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("normalized", [False, True])
def test_the_loss_is_the_formula(smoothing: float, normalized: bool) -> None:
    """And the reference for conformance gives the same."""
    config = {"beta": 0.3, "label_smoothing": smoothing, "length_normalized": normalized}
    winner, loser = gains(given())
    if normalized:
        winner, loser = winner / 3, loser / 5
    z = 0.3 * (winner - loser)
    expected = (1 - smoothing) * math.log1p(math.exp(-z)) + smoothing * math.log1p(math.exp(z))
    # fp64 throughout.
    assert loss_of(make(**config), given()) == pytest.approx(expected, rel=1e-9)
    assert reference_loss(DpoConfig(**config), given()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalized", [False, True])
def test_at_the_reference_the_loss_is_the_logarithm_of_two(normalized: bool) -> None:
    inputs = given(reference_log_probs=given().log_probs)
    # One rounding of fp64.
    assert loss_of(make(length_normalized=normalized), inputs) == pytest.approx(math.log(2), rel=1e-15)


def test_the_other_preference_costs_the_margin_more() -> None:
    """L(w, l) - L(l, w) = -z."""
    winner, loser = gains(given())
    other = given(advantages=np.array([-1.0, 1.0]))
    difference = loss_of(make(beta=0.7), given()) - loss_of(make(beta=0.7), other)
    assert difference == pytest.approx(-0.7 * (winner - loser), rel=1e-9)


def test_smoothing_takes_the_other_preference_for_true_in_that_share_of_the_pairs() -> None:
    """Conservative DPO: (1 - s) L(w, l) + s L(l, w)."""
    one, other = (loss_of(make(beta=0.3), given(advantages=np.array(signs))) for signs in ([1.0, -1.0], [-1.0, 1.0]))
    smoothed = loss_of(make(beta=0.3, label_smoothing=0.1), given(advantages=np.array([1.0, -1.0])))
    assert abs(one - other) > 0.01
    # fp64 throughout, up to the loss in fp32.
    assert smoothed == pytest.approx(0.9 * one + 0.1 * other, rel=1e-6)


def test_best_and_worst_of_a_group_are_a_pair() -> None:
    inputs = given()
    track = dataclasses.replace(
        track_of(inputs), reward_parts={"one": torch.tensor([0.0, 1.0])}, advantages=None, unit_ids=None
    )
    track, numbers = make().advantages(track)
    assert [sorted(rows) for rows in track.units()] == [[0, 1]]
    assert numbers["pairs"] == 1 and track.advantages is not None
    # The second is the winner.
    assert make().loss_weights(track)["policy"].tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("units", "texts", "says"),
    [(("a", "a", "a"), ("p", "p", "p"), "expected two: a winner"), (("a", "a", "b"), ("p", "q", "q"), "one prompt")],
)
def test_three_sides_and_unequal_prompts_are_refused(units: tuple[str, ...], texts: Any, says: str) -> None:
    three = given(
        valid=np.ones((3, 5), dtype=bool),
        **{name: np.zeros((3, 5)) for name in ("log_probs", "old_log_probs", "engine_log_probs")},
        advantages=np.array([1.0, 0.0, -1.0]),
        weights=np.ones(3),
        is_truncated=np.zeros(3, dtype=bool),
    )
    track = track_of(three)
    track = dataclasses.replace(track, unit_ids=units, inputs=Inputs.of_texts(texts))
    with pytest.raises(BatchError, match=says):
        make().loss_weights(track)


def test_a_micro_batch_of_one_sample_is_refused() -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-text-dpo", ["train.micro_batch_size=1"], catalog=catalog)
    (reason,) = match(plan, catalog=catalog).reasons
    assert str(reason).startswith("train.micro_batch_size: got 1, expected 0 or at least 2: algorithm 'dpo' compares")
