"""The NumPy reference against golden vectors, and the algorithm against the reference under every setting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from clip_vectors import CLIPS
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import FlowDppoConfig, FlowGrpoConfig
from unirl.algorithms.flow_grpo.reference import loss
from unirl.conformance.reference import LossInputs
from unirl.core.roles import Replayed
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

# Of the golden vectors: log-probs before and after, and advantages, of which 6 is clamped to 5.
OLD = (-1.0, -1.0002, -0.9999, -1.00005)
NEW = (-0.99985, -1.00025, -1.0001, -1.00004)
ADVANTAGES = (1.5, -0.7, 5.0, -2.0)
SHIFTS = (2e-5, 5e-6, 3e-5, 2e-5)
"""Bias mean(shift^2) / (2 s^2) of each log-ratio."""
STD = 0.35
SAMPLER = Sampler(kernel="flow-sde", eta=0.7)


def golden(**changed: Any) -> LossInputs:
    """Four samples of one step from sigma 0.75 to 2/3, of two elements."""
    shifts = STD * np.sqrt(2 * np.array(SHIFTS))
    means = np.broadcast_to(shifts[:, None, None], (4, 1, 2))
    given: dict[str, Any] = {
        "log_probs": np.array(NEW)[:, None],
        "old_log_probs": np.array(OLD)[:, None],
        "means": means,
        "old_means": np.zeros((4, 1, 2)),
        "reference_means": np.zeros((4, 1, 2)),
        "std": np.full((4, 1), STD),
        "g": np.full((4, 1), STD / math.sqrt(0.75 - 2 / 3)),
        "sigmas": np.array([1.0, 0.75, 2 / 3, 0.0]),
        "sde_steps": np.ones((4, 1), dtype=np.int64),
        "sampler": SAMPLER,
        "advantages": np.array(ADVANTAGES),
        "weights": np.ones(4),
        "progress": 0.0,
    }
    return LossInputs(**{**given, **changed})


def ppo(log_ratio: float, advantage: float, **settings: Any) -> float:
    """Loss of one sample."""
    one = golden(
        log_probs=np.array([[log_ratio]]), old_log_probs=np.zeros((1, 1)), advantages=np.array([advantage]),
        weights=np.ones(1), std=np.full((1, 1), STD), sde_steps=np.ones((1, 1), dtype=np.int64),
    )  # fmt: skip
    return loss(FlowGrpoConfig(**{"clip_range": 0.2, **settings}), one)


def test_flow_grpo_meets_the_golden_vector() -> None:
    # All 16 digits of an fp64 mean of four terms, less one for the order of its sum.
    assert loss(FlowGrpoConfig(clip_range=1e-4), golden()) == pytest.approx(-0.9497912747545868, rel=1e-14)


def test_guard_meets_the_golden_vector() -> None:
    result = loss(FlowGrpoConfig(clip_range=2e-6, ratio_norm=True), golden())
    # The biases go through a square root and back: a few units of the last digit of 5e-5, next to 1.
    assert result == pytest.approx(-0.9499214771850496, rel=1e-14)
    divided = loss(FlowGrpoConfig(clip_range=2e-6, ratio_norm=True, step_weight="inverse-dt"), golden())
    assert divided == pytest.approx(12 * -0.9499214771850496, rel=1e-12)


@CLIPS
def test_clips_meet_the_golden_vectors(
    log_ratio: float, advantage: float, settings: dict[str, Any], expected: float
) -> None:
    assert ppo(log_ratio, advantage, **settings) == pytest.approx(expected, abs=1e-10)


def test_flow_dppo_meets_the_golden_vector() -> None:
    # The shifts were made to have the vector's divergences; 15 digits of the mean of four terms.
    assert loss(FlowDppoConfig(), golden()) == pytest.approx(-0.5747537747545869, rel=1e-14)


def test_one_ratio_per_sample_meets_the_golden_vector() -> None:
    """GSPO's: rows of three steps and of two, whose losses are -r at an advantage of 1 and r at -1."""
    steps = np.array([[0, 1, 2], [0, 1, -1]])
    rows = golden(
        log_probs=np.array([[0.1, -0.1, 0.1], [0.1, -0.3, math.nan]]), old_log_probs=np.zeros((2, 3)),
        advantages=np.array([1.0, -1.0]), weights=np.ones(2), sde_steps=steps,
    )  # fmt: skip
    # Five steps in all, three of them of the first row; a clip that binds nowhere.
    expected = (-3 * 1.033895113514 + 2 * 0.904837418036) / 5
    assert loss(FlowGrpoConfig(ratio="sequence", clip_range=0.2), rows) == pytest.approx(expected, abs=1e-12)


def test_cispo_weighs_the_log_prob_by_the_clipped_ratio() -> None:
    weights = np.exp(np.array(NEW) - np.array(OLD)).clip(1 - 1e-4, 1 + 5e-5)
    expected = -(weights * np.array(ADVANTAGES) * np.array(NEW)).mean()
    config = FlowGrpoConfig(loss="cispo", clip_range=1e-4, clip_range_high=5e-5)
    assert loss(config, golden()) == pytest.approx(expected, rel=1e-14)


def test_the_velocity_form_of_the_kl_is_that_of_the_velocities() -> None:
    """A step from sigma 0.75 to 2/3 with v - v_ref = 0.3 everywhere moves the mean by 0.3 (1 + g^2 / 6) / 12."""
    g_squared = 0.7**2 * 0.75 / 0.25
    shift = 0.3 * (1 + g_squared * 0.25 / 1.5) / 12
    flat = golden(advantages=np.zeros(4), means=np.full((4, 1, 2), shift), reference_means=np.zeros((4, 1, 2)))
    assert loss(FlowGrpoConfig(kl_coef=1.0, kl_form="velocity"), flat) == pytest.approx(0.09, rel=1e-12)
    weighed = loss(FlowGrpoConfig(kl_coef=1.0, kl_form="velocity", kl_step_weight="inverse-dt"), flat)
    assert weighed == pytest.approx(12 * 0.09, rel=1e-12)


def test_both_forms_of_the_kl_meet_their_identity() -> None:
    flat = golden(advantages=np.zeros(4))
    true = loss(FlowGrpoConfig(kl_coef=1.0), flat)
    # The shifts were made to have these divergences.
    assert true == pytest.approx(sum(SHIFTS) / 4, rel=1e-12)
    # The published code leaves out the step's length, here 1/12.
    assert loss(FlowGrpoConfig(kl_coef=1.0, kl_form="flow-grpo-code"), flat) == pytest.approx(true / 12, rel=1e-12)


def test_a_gated_kl_is_that_of_some_samples_over_the_number_of_all() -> None:
    gated = golden(advantages=np.zeros(4), kl_weights=np.array([0.0, 1.0, 0.0, 1.0]))
    assert loss(FlowGrpoConfig(kl_coef=1.0), gated) == pytest.approx((SHIFTS[1] + SHIFTS[3]) / 4, rel=1e-12)


def test_schedules_shrink_the_clip() -> None:
    far = {"log_ratio": 1.0, "advantage": 1.0}
    assert [ppo(**far, clip_schedule=name) for name in ("constant", "linear", "cosine")] == [-1.2] * 3
    ends = {name: _ppo_at(1.0, name) for name in ("constant", "linear", "cosine")}
    # Linear ends at half of the range, cosine at none of it; halfway it is at half.
    assert ends == pytest.approx({"constant": -1.2, "linear": -1.1, "cosine": -1.0}, rel=1e-14)
    assert _ppo_at(0.5, "cosine") == pytest.approx(-1.1, rel=1e-14)


def _ppo_at(progress: float, schedule: str) -> float:
    one = golden(log_probs=np.ones((4, 1)), old_log_probs=np.zeros((4, 1)), advantages=np.ones(4), progress=progress)
    return loss(FlowGrpoConfig(clip_range=0.2, clip_schedule=schedule), one)


def test_rows_without_weight_count_nowhere_even_when_they_are_nan() -> None:
    padded = golden(weights=np.array([1.0, 1.0, 0.0, 0.0]))
    poisoned = np.array(NEW)[:, None].copy()
    poisoned[2:] = math.nan
    config = FlowGrpoConfig(clip_range=1e-4)
    # Of the golden vector's terms the first two.
    expected = (-1.50015 + 0.699965000875) / 2
    assert loss(config, padded) == pytest.approx(expected, abs=1e-12)
    assert loss(config, golden(weights=padded.weights, log_probs=poisoned)) == loss(config, padded)


def test_samples_without_advantage_may_be_left_out() -> None:
    half = golden(advantages=np.array([1.5, 0.0, 0.0, -2.0]))
    whole = loss(FlowGrpoConfig(clip_range=1e-4), half)
    assert loss(FlowGrpoConfig(clip_range=1e-4, drop_zero_advantage=True), half) == pytest.approx(2 * whole, rel=1e-14)
    nothing = golden(advantages=np.zeros(4))
    assert loss(FlowGrpoConfig(drop_zero_advantage=True), nothing) == 0.0


POLICY: dict[str, tuple[Any, ...]] = {
    "loss": ("clip", "cispo", "divergence"),
    "ratio": ("step", "sequence"),
    "threshold": (None, 0.01),
    "ratio_norm": (False, True),
    "step_weight": ("uniform", "inverse-dt", "noise"),
    "clip_schedule": ("constant", "linear", "cosine"),
    "clip_range_high": (None, 0.08),
    "dual_clip": (None, 1.1),
    "drop_zero_advantage": (False, True),
}
KL: dict[str, tuple[Any, ...]] = {
    "kl_coef": (0.04,),
    "kl_form": ("gaussian", "flow-grpo-code", "velocity"),
    "kl_step_weight": ("uniform", "inverse-dt", "noise"),
    "drop_zero_advantage": (False, True),
}


# Of the losses 288 settings of clip, 36 of cispo and 6 of divergence; the others are refused.
@pytest.mark.parametrize(("group", "count"), [(POLICY, 288 + 36 + 6), (KL, 18)], ids=["policy", "kl"])
def test_the_algorithm_agrees_with_its_reference_under_every_setting(
    group: dict[str, tuple[Any, ...]], count: int
) -> None:
    inputs, accepted = random_inputs(), 0
    for values in itertools.product(*group.values()):
        settings = dict(zip(group, values, strict=True))
        config = FlowGrpoConfig(clip_range=0.05, **settings)
        if list(config.problems(None, None)):
            continue
        accepted += 1
        # fp64 on both sides: rounding of a sum of 15 terms of order 10.
        expected = pytest.approx(loss(config, inputs), rel=1e-12, abs=1e-13)
        assert loss_of_the_algorithm(config, inputs) == expected, settings
    assert accepted == count


def test_the_inputs_tell_losses_apart() -> None:
    """A mask that binds nowhere or everywhere would not be tested."""
    inputs = random_inputs()
    shift = ((inputs.means - inputs.old_means) ** 2).mean(axis=2) / (2 * inputs.std**2)
    is_far = (shift >= 0.01)[inputs.sde_steps >= 0]
    assert 0.2 < is_far.mean() < 0.8


def random_inputs() -> LossInputs:
    """Five samples of three steps, one of them with two, one without advantage, one of weight 0."""
    rng = np.random.default_rng(3)
    shape = (5, 3)
    old, log_ratio = rng.normal(-1, 0.5, shape), rng.normal(0, 0.1, shape)
    means = rng.normal(0, 1, (*shape, 4))
    steps = np.array([[0, 1, 2], [0, 1, 2], [1, 2, -1], [0, 1, 2], [0, 1, 2]])
    std = rng.uniform(0.3, 0.7, shape)
    sigmas = np.array([1.0, 0.9, 0.7, 0.4, 0.0])
    return LossInputs(
        log_probs=np.where(steps < 0, 0, old + log_ratio),
        old_log_probs=np.where(steps < 0, 0, old),
        means=means,
        old_means=means + rng.normal(0, 0.1, means.shape),
        reference_means=means + rng.normal(0, 0.2, means.shape),
        std=std,
        g=std / np.sqrt((sigmas[:-1] - sigmas[1:])[steps.clip(0)]),
        sigmas=sigmas,
        sde_steps=steps,
        sampler=SAMPLER,
        advantages=np.array([1.2, -0.4, 0.0, -1.5, 2.0]),
        kl_weights=np.array([0.0, 1.0, 1.0, 0.5, 1.0]),
        weights=np.array([1.0, 1.0, 1.0, 1.0, 0.0]),
        progress=0.3,
    )


class GivenReplay:
    def __init__(self, inputs: LossInputs) -> None:
        self._inputs = inputs

    def __call__(self, track: Track, *, policy: str = "live") -> Replayed:
        inputs = self._inputs
        means = torch.tensor(inputs.means if policy == "live" else inputs.reference_means)
        return Replayed(
            log_probs=torch.tensor(inputs.log_probs),
            means=means,
            std=torch.tensor(inputs.std)[..., None],
            g=torch.tensor(inputs.g)[..., None],
            next=means,
            valid=torch.tensor(inputs.sde_steps >= 0),
        )


def loss_of_the_algorithm(config: FlowGrpoConfig, inputs: LossInputs) -> float:
    rows = len(inputs.weights)
    ids = tuple(f"p/{row}" for row in range(rows))
    track = Track(
        name="image",
        sample_ids=ids,
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts(("p",) * rows),
        metadata=({},) * rows,
        segment=LatentSegment(
            latents=torch.zeros(rows, 1, 4),
            positions=torch.zeros(rows, 1, dtype=torch.int64),
            sde_steps=torch.tensor(inputs.sde_steps),
            log_probs=torch.tensor(inputs.old_log_probs),
            means=torch.tensor(inputs.old_means),
            sigmas=torch.tensor(inputs.sigmas),
            sampler=inputs.sampler,
        ),
        advantages=torch.tensor(inputs.advantages),
        kl_weights=None if inputs.kl_weights is None else torch.tensor(inputs.kl_weights),
        sample_weights=torch.tensor(inputs.weights),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )
    algorithm = FlowGrpo(config, advantage=AdvantageConfig(), reward_weights={"one": 1.0}, train=TrainConfig())
    losses = algorithm.loss(track, GivenReplay(inputs), progress=inputs.progress)  # type: ignore[arg-type]
    return float(reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))))  # type: ignore[arg-type]
