"""Placement colocate: who has the device is asleep or offloaded before the other takes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import changed
from small_runs import EVALUATED, catalog, plan, run
from unirl.core.specs.capability import Cap
from unirl.launchers.ray.actors import Call
from unirl.launchers.ray.cluster import Cluster
from unirl.launchers.ray.worker import Worker

BUILD = [
    ("train-0", "build"),
    ("train-0", "offload"),
    ("rollout-0", "build"),
    ("rollout-0", "sleep"),
    ("train-0", "onload"),
    ("reward-0", "build"),
]
SYNC = [
    ("train-0", "weights.hold_export"),
    ("train-0", "offload"),
    ("rollout-0", "wake"),
    ("train-0", "weights.ship"),
    ("train-0", "weights.forget_export"),
]
# Both rewards.
ROLLOUT = [("rollout-0", "generate"), ("reward-0", "score"), ("reward-0", "score")]
BACK = [("rollout-0", "sleep"), ("train-0", "onload")]
TRAIN = [("train-0", "bring"), ("train-0", "train"), ("train-0", "end_rollout")]


@pytest.mark.slow
def test_a_device_is_free_before_the_other_one_takes_it(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    sent = Cluster._sent
    watched = {method for _, method in (*BUILD, *SYNC, *ROLLOUT, *BACK, *TRAIN)} | {"save"}

    def noted(cluster: Cluster, call: Call) -> Any:
        if call.method in watched:
            asked.append((call.actor.name, call.method))
        return sent(cluster, call)

    monkeypatch.setattr(Cluster, "_sent", noted)
    run(tmp_path / "run", *EVALUATED, "run.max_steps=2", "launcher=ray", "launcher.placement=colocate")
    # The rollout of an evaluation leaves the device with the rollout workers, who need it next.
    first = [*SYNC, *ROLLOUT, *ROLLOUT, *BACK, *TRAIN]
    second = [*SYNC, *ROLLOUT, *BACK, *TRAIN]
    last = [*SYNC, *ROLLOUT, *BACK, ("train-0", "save")]
    assert asked == [*BUILD, *first, *second, *last]


class Recorded:
    """Appends the names of the methods that are called on it."""

    def __init__(self, called: list[str]) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        return lambda: self._called.append(name)


@pytest.mark.parametrize(("method", "before"), [("offload", ["offload"]), ("sleep", ["sleep", "offload"])])
def test_memory_goes_back_to_the_device_once_everything_has_left_it(
    method: str, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plan("launcher=ray", "launcher.placement=colocate")
    worker = Worker(
        "rollout-0", expected, run="r", ask=_nobody, tell=_nobody, machine="here", host="127.0.0.1", has_gpu=False
    )
    called = list[str]()
    part: Any = Recorded(called)
    learner = expected.only.learner.name
    worker._parts = SimpleNamespace(engines={learner: part}, backends={learner: part})  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    getattr(worker, method)()
    assert called == before, "there is no such memory on a CPU"
    called.clear()
    worker._device = torch.device("cuda")
    getattr(worker, method)()
    assert called == [*before, "empty_cache"]


@pytest.mark.gpu
def test_an_offloaded_worker_holds_nothing_of_its_gpu() -> None:
    worker = Worker(
        "train-0",
        plan("launcher=ray", "launcher.placement=colocate", "run.device=cuda"),
        run="r",
        ask=_nobody,
        tell=_nobody,
        machine="here",
        host="127.0.0.1",
        has_gpu=True,
    )
    worker.build("train", with_engine=False)
    kept = 2**26
    # What a step has used and freed.
    torch.empty(kept, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    worker.offload()
    assert torch.cuda.memory_reserved() <= held - kept


def _nobody(*_: Any) -> Any:
    raise AssertionError("a worker alone asks nobody")


def asked_of_the_plan(plan) -> list[str]:
    """Problems that the settings of the launcher find in a plan."""
    assert plan.launcher is not None
    return [str(reason.under("launcher")) for reason in plan.launcher.config.problems(plan, plan.only)]


def test_an_engine_that_cannot_sleep_is_refused_for_a_device_that_it_shares() -> None:
    expected = plan("launcher=ray", "launcher.placement=colocate")
    assert asked_of_the_plan(expected) == []
    spec = expected.only.engine.spec
    spec = dataclasses.replace(
        spec, capabilities=(spec.capabilities - {Cap.WEIGHTS_SHARED, Cap.SLEEP}) | {Cap.WEIGHTS_FULL}
    )
    sleepless = changed(expected, engine=dataclasses.replace(expected.only.engine, spec=spec))
    (reason,) = asked_of_the_plan(sleepless)
    assert reason.startswith("launcher.placement: got 'colocate', but engine 'trainside' cannot sleep")
    assert catalog().check_plan(expected) == []


def test_an_engine_whose_sleep_is_not_switched_on_is_refused_for_a_device_that_it_shares() -> None:
    """Whatever the setting is called: the spec of the engine says what switches sleep on."""
    expected = plan("launcher=ray", "launcher.placement=colocate")
    spec = dataclasses.replace(expected.only.engine.spec, enabled_by={Cap.SLEEP: {"forward_batch": 3}})
    switched = changed(expected, engine=dataclasses.replace(expected.only.engine, spec=spec))
    (reason,) = asked_of_the_plan(switched)
    assert reason.startswith("engine.forward_batch: got 0, but with launcher.placement=colocate")
    assert reason.endswith("set engine.forward_batch=3.")


def test_an_engine_with_weights_of_its_own_is_refused_where_none_are_sent() -> None:
    expected = plan("launcher=ray")
    assert asked_of_the_plan(expected) == []
    spec = expected.only.engine.spec
    spec = dataclasses.replace(spec, capabilities=(spec.capabilities - {Cap.WEIGHTS_SHARED}) | {Cap.WEIGHTS_FULL})
    (reason,) = asked_of_the_plan(changed(expected, engine=dataclasses.replace(expected.only.engine, spec=spec)))
    assert reason.startswith("launcher.placement: got 'trainside'")
    assert reason.endswith("would never receive the trained ones. Use separate, or colocate.")
