"""Rollouts ahead of training, streamed ones, and those of an older policy: what they need."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from plans import changed
from toy_specs import (
    ALGORITHM,
    BACKEND,
    ENGINE,
    PARTS,
    having,
    make_plan,
    refusals,
    without,
)
from unirl.core.match.match import match
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import DataConfig, RunConfig, TrainConfig
from unirl.core.specs.part_config import LauncherConfig
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import EngineSpec, LauncherSpec

OWN_WEIGHTS = dataclasses.replace(
    ENGINE,
    capabilities=(ENGINE.capabilities - {Cap.WEIGHTS_SHARED}) | {Cap.WEIGHTS_FULL, Cap.WEIGHTS_LORA},
)


@dataclass
class Placed(LauncherConfig):
    placement: str = "trainside"


def ahead_plan(*, staleness: Any = "any", old_log_probs: str = "replay", **changes: Any) -> Plan:
    algorithm = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, staleness=staleness))
    changes = {"engine": OWN_WEIGHTS, "algorithm": algorithm, **changes}
    engine = changes["engine"]
    changes["engine"] = dataclasses.replace(engine, capabilities=engine.capabilities | {Cap.LOG_PROBS_GAUSSIAN})
    return make_plan(run=RunConfig(max_staleness=1), train=TrainConfig(old_log_probs=old_log_probs), **changes)


def launched(placement: str, separates: dict[str, Any] | None) -> Any:
    spec = LauncherSpec(name="cluster", separates=separates, **PARTS)
    return Choice(key="launcher", spec=spec, config=Placed(placement=placement), dist="toy", version="1")


def test_rollouts_ahead_need_an_algorithm_that_states_that_it_can_use_them() -> None:
    assert refusals(ahead_plan()) == []
    for staleness, says in (("unstated", "does not state that it can"), ("none", "cannot with these settings")):
        (result,) = refusals(ahead_plan(staleness=staleness))
        assert result == (
            "run.max_staleness: got 1, which trains on samples from older weights; algorithm 'grpo-like' "
            f"{says}. Use 0."
        )


def test_a_setting_of_the_algorithm_can_take_it_back() -> None:
    plan = ahead_plan()
    strict = dataclasses.replace(plan.only.algorithm.spec, when={"kl_coef": Needs(staleness="none")})
    plan = changed(plan, algorithm=dataclasses.replace(plan.only.algorithm, spec=strict))
    assert refusals(plan) == []
    plan.only.algorithm.config.kl_coef = 0.1  # type: ignore[attr-defined]
    assert len(refusals(plan)) == 1


def test_a_ratio_corrects_for_staleness_with_the_engines_log_probs_alone() -> None:
    assert refusals(ahead_plan(staleness="ratio", old_log_probs="engine")) == []
    (result,) = refusals(ahead_plan(staleness="ratio"))
    assert result.startswith("train.old_log_probs: got 'replay', which takes ratios to the current weights")
    assert result.endswith("Set train.old_log_probs=engine.")


@pytest.mark.parametrize("launcher", [None, launched("trainside", None)])
def test_rollouts_ahead_need_weights_that_training_does_not_change(launcher: Any) -> None:
    assert refusals(ahead_plan(launcher=launcher)) == []
    (result,) = refusals(ahead_plan(engine=ENGINE, launcher=launcher))
    assert result.startswith("run.max_staleness: got 1; engine 'inside' shares its weights with training")


@pytest.mark.parametrize("engine", [ENGINE, OWN_WEIGHTS])
def test_workers_that_train_and_generate_cannot_do_both_at_once(engine: EngineSpec) -> None:
    separates = {"placement": "separate"}
    assert refusals(ahead_plan(engine=engine, launcher=launched("separate", separates))) == []
    (result,) = refusals(ahead_plan(engine=engine, launcher=launched("trainside", separates)))
    assert result == (
        "launcher.placement: got 'trainside', where the same workers generate and train; run.max_staleness=1 needs both "
        "to run at the same time. Set launcher.placement=separate."
    )


@pytest.mark.parametrize("ahead", [2, 3, 1000])
def test_any_number_of_rollouts_may_be_ahead(ahead: int) -> None:
    assert refusals(dataclasses.replace(ahead_plan(), run=RunConfig(max_staleness=ahead))) == []


def test_a_negative_number_of_rollouts_ahead_is_refused() -> None:
    plan = dataclasses.replace(ahead_plan(), run=RunConfig(max_staleness=-1))
    assert refusals(plan) == ["run.max_staleness: got -1, expected 0 or more. The default is 0."]


@pytest.mark.parametrize(("groups", "is_refused"), [(-1, True), (0, False), (3, False), (4, True), (9, True)])
def test_a_streamed_rollout_has_two_pieces_at_least(groups: int, is_refused: bool) -> None:
    plan = make_plan(
        run=RunConfig(reward_overlap_groups=groups), data=DataConfig(train="prompts.txt", prompts_per_step=4)
    )
    assert [reason.key for reason in match(plan).reasons] == ["run.reward_overlap_groups"] * is_refused


@pytest.mark.parametrize(("sampler", "cap"), [("lagged", Cap.LAGGED_POLICY), ("ema", Cap.EMA)])
def test_a_policy_to_sample_from_must_be_kept_by_the_backend(sampler: Any, cap: Cap) -> None:
    algorithm = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", sampler=sampler))
    kept = having(BACKEND, cap)
    assert refusals(make_plan(algorithm=algorithm, backend=kept)) == []
    (result,) = refusals(make_plan(algorithm=algorithm, backend=without(BACKEND, cap)))
    assert result == (
        f"backend: algorithm 'grpo-like', which trains on samples from the {sampler} policy, needs {cap.value!r}; backend "
        f"{BACKEND.name!r} does not provide it."
    )
    scored = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, sampler=sampler))
    (result,) = refusals(make_plan(algorithm=scored, backend=kept))
    assert result.startswith(f"algorithm: algorithm 'grpo-like' takes log-probs of samples from the {sampler} policy")


def test_a_lagged_policy_does_not_sample_ahead_with_weights_that_training_shares() -> None:
    needs = Needs(track="latent", sampler="lagged", staleness="any")
    plan = make_plan(
        algorithm=dataclasses.replace(ALGORITHM, needs=needs),
        backend=having(BACKEND, Cap.LAGGED_POLICY),
        engine=having(ENGINE, Cap.WEIGHTS_SHARED),
        run=RunConfig(max_staleness=1),
    )
    (result,) = refusals(plan)
    assert result.startswith("run.max_staleness: got 1; engine 'inside' shares its weights with training")
