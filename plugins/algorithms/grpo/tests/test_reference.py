"""The NumPy reference against golden vectors, and the algorithm against the reference under every setting."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from clip_vectors import CLIPS
from token_algorithms.given import GivenReplay, random_inputs, reduced, track_of
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.config import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePpConfig,
    RlooConfig,
)
from unirl.algorithms.grpo.reference import loss
from unirl.conformance.reference import TokenLossInputs
from unirl.core.specs.config import AdvantageConfig, TrainConfig


def inputs(log_ratio: Any, advantages: Any, valid: Any = None, **changed: Any) -> TokenLossInputs:
    """Old log-probs 0, everything else equal to the live ones."""
    log_probs = np.array(log_ratio, dtype=np.float64)
    zero = np.zeros_like(log_probs)
    rows = len(log_probs)
    given: dict[str, Any] = {
        "log_probs": log_probs,
        "old_log_probs": zero,
        "engine_log_probs": zero,
        "reference_log_probs": log_probs,
        "entropy": zero,
        "valid": np.ones_like(log_probs, dtype=bool) if valid is None else np.array(valid, dtype=bool),
        "advantages": np.array(advantages, dtype=np.float64),
        "weights": np.ones(rows),
        "is_truncated": np.zeros(rows, dtype=bool),
    }
    return TokenLossInputs(**{**given, **changed})


@CLIPS
def test_clips_meet_the_golden_vectors(
    log_ratio: float, advantage: float, settings: dict[str, Any], expected: float
) -> None:
    one = inputs([[log_ratio]], [advantage])
    assert loss(GrpoConfig(**settings), one) == pytest.approx(expected, abs=1e-10)
    assert loss_of_the_algorithm(GrpoConfig(**settings), one) == pytest.approx(expected, abs=1e-10)


def test_gspo_meets_its_golden_ratios() -> None:
    """Ratios 1.033895113514 and .904837418036 of a text of three tokens and one of two, inside the clip."""
    both = inputs([[0.1, -0.1, 0.1], [0.1, -0.3, 7.0]], [1.0, 1.0], [[1, 1, 1], [1, 1, 0]])
    config = GspoConfig(clip_range=0.2, clip_range_high=0.2)
    expected = -(1.033895113514 + 0.904837418036) / 2
    # Twelve decimals; the algorithm's weights of a third and a half are fp32.
    assert loss(config, both) == pytest.approx(expected, abs=2e-12)
    assert loss_of_the_algorithm(config, both) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.2), ("k2", 0.02), ("k3", 0.0187308)])
def test_divergences_meet_the_golden_vectors(estimator: str, expected: float) -> None:
    """Log-prob -1, reference -1.2; the advantage is 0, so the loss is the divergence."""
    one = inputs([[-1.0]], [0.0], old_log_probs=np.array([[-1.0]]), reference_log_probs=np.array([[-1.2]]))
    config = GrpoConfig(kl_coef=1.0, kl_estimator=estimator)
    # Seven decimals.
    assert loss(config, one) == pytest.approx(expected, abs=5e-8)
    assert loss_of_the_algorithm(config, one) == pytest.approx(expected, abs=5e-8)


def test_a_gated_divergence_is_that_of_some_completions_over_the_number_of_all() -> None:
    both = inputs(
        [[-1.0], [-1.0]],
        [0.0, 0.0],
        old_log_probs=np.full((2, 1), -1.0),
        reference_log_probs=np.array([[-1.2], [-3.0]]),
        kl_weights=np.array([1.0, 0.0]),
    )
    config = GrpoConfig(kl_coef=1.0)
    # Seven decimals.
    assert loss(config, both) == pytest.approx(0.0187308 / 2, abs=5e-8)
    assert loss_of_the_algorithm(config, both) == pytest.approx(0.0187308 / 2, abs=5e-8)


def test_the_loss_takes_the_coefficient_of_its_step() -> None:
    """The divergence .0187308 above a target of .01, at a fifth of a horizon: half of it as before, .52 of it after."""
    one = inputs([[-1.0]], [0.0], old_log_probs=np.array([[-1.0]]), reference_log_probs=np.array([[-1.2]]))
    algorithm = grpo(GrpoConfig(kl_coef=0.5, kl_target=0.01, kl_horizon=40.0))
    assert loss_of(algorithm, one) == pytest.approx(0.5 * 0.0187308, abs=5e-8)
    assert algorithm.end_step({"kl": 0.0187308, "samples": 8.0}) == {"kl_coef": 0.5}
    assert loss_of(algorithm, one) == pytest.approx(0.52 * 0.0187308, abs=5e-8)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 1.0),
        ("seq-mean-token-sum", 4.375),
        ("seq-mean-token-mean", 1.0),
        ("seq-mean-token-sum-norm", 0.875),
    ],
)
def test_aggregations_meet_the_golden_vectors(aggregation: str, expected: float) -> None:
    """A loss of 1 for each of 35 tokens of 8 texts, up to 5 each, and a constant of 5."""
    lengths = (5, 5, 5, 5, 5, 5, 4, 1)
    valid = [[place < length for place in range(5)] for length in lengths]
    ones = inputs(np.zeros((8, 5)), [-1.0] * 8, valid)
    config = GrpoConfig(aggregation=aggregation, max_length=5)
    assert loss(config, ones) == pytest.approx(expected, rel=1e-14)
    # Weights of tokens are fp32.
    assert loss_of_the_algorithm(config, ones) == pytest.approx(expected, rel=1e-6)


SETTINGS: dict[str, tuple[Any, ...]] = {
    "loss_and_ratio": (("clip", "token"), ("clip", "sequence"), ("cispo", "token")),
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "kl": ((0.0, "k3"), (0.04, "k1"), (0.04, "k2"), (0.04, "k3")),
    "entropy_coef": (0.0, 0.01),
    "tis": ("none", "token", "sequence"),
    "rows": (("keep", False), ("mask", True)),
}


def test_the_algorithm_agrees_with_its_reference_under_every_setting() -> None:
    given = random_inputs()
    given = dataclasses.replace(given, kl_weights=np.arange(len(given.weights)) % 2)
    for values in itertools.product(*SETTINGS.values()):
        settings = dict(zip(SETTINGS, values, strict=True))
        kind, ratio = settings.pop("loss_and_ratio")
        kl_coef, kl_estimator = settings.pop("kl")
        truncated, drops = settings.pop("rows")
        config = GrpoConfig(
            loss=kind, ratio=ratio, clip_range=0.05, clip_range_high=0.08, kl_coef=kl_coef, kl_estimator=kl_estimator, truncated=truncated,
            drop_zero_advantage=drops, dual_clip=1.1 if kind == "clip" else None, max_length=9, tis_cap=1.05, **settings,
        )  # fmt: skip
        # Losses are fp64 and of order 1, weights of tokens and advantages fp32: 6e-8 each.
        assert loss_of_the_algorithm(config, given) == pytest.approx(loss(config, given), rel=1e-6, abs=1e-6), config


@pytest.mark.parametrize(
    "config",
    [
        DrGrpoConfig(max_length=9),
        DapoConfig(),
        GspoConfig(),
        CispoConfig(),
        RlooConfig(),
        RlooConfig(ratio="completion", clip_range=0.05, dual_clip=1.5),
        ReinforcePpConfig(kl_coef=0.1),
        GrpoConfig(kl_coef=0.1, kl_estimator="k1", kl_straight_through=True, kl_weighs_by_ratio=True),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_named_relatives_agree_with_the_reference(config: GrpoConfig) -> None:
    given = random_inputs()
    # As above.
    assert loss_of_the_algorithm(config, given) == pytest.approx(loss(config, given), rel=1e-6, abs=1e-6)


def test_rows_without_weight_count_nowhere_even_when_they_are_nan() -> None:
    given = random_inputs()
    names = ("log_probs", "old_log_probs", "engine_log_probs", "reference_log_probs", "entropy")
    bad = {name: np.where(given.weights[:, None] == 0, math.nan, getattr(given, name)) for name in names}
    poisoned = dataclasses.replace(given, **bad)
    for tis in ("none", "token", "sequence"):
        config = GrpoConfig(kl_coef=0.1, entropy_coef=0.1, tis=tis)
        assert loss(config, poisoned) == loss(config, given)
        assert loss_of_the_algorithm(config, poisoned) == loss_of_the_algorithm(config, given)


def grpo(config: GrpoConfig) -> Grpo:
    return Grpo(config, advantage=AdvantageConfig(), reward_weights={"one": 1.0}, train=TrainConfig())


def loss_of_the_algorithm(config: GrpoConfig, given: TokenLossInputs) -> float:
    return loss_of(grpo(config), given)


def loss_of(algorithm: Grpo, given: TokenLossInputs) -> float:
    track = track_of(given)
    return reduced(algorithm.loss(track, GivenReplay(given), progress=given.progress), algorithm.loss_weights(track))
