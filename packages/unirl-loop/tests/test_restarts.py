"""Runs that lose a process and start again by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import events, plan, run, steps, tensors
from unirl.core.errors import PlanRejected, ProcessLost, RunFailed
from unirl.core.match.match import match
from unirl.loop import restarts
from unirl.loop import step as loop_step
from unirl.loop.restarts import with_restarts


class Attempts:
    """What each call of an attempt raises, or returns where it is no exception."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[tuple[Path | None, list[str]]] = []

    def __call__(self, resume: Path | None, findings: Sequence[str]) -> str:
        self.calls.append((resume, list(findings)))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


LOST = "launcher: worker 'train-1' died"


def test_a_lost_process_is_tried_again_and_other_failures_are_not(tmp_path: Path) -> None:
    tried = Attempts(ProcessLost(LOST), ProcessLost("engine died"), "done")
    assert with_restarts(tried, limit=3, folder=tmp_path, resume=None) == "done"
    # No checkpoint is in the folder.
    reasons = [[], [f"restart 1 of 3: {LOST}"], ["restart 2 of 3: engine died"]]
    assert tried.calls == [(None, reason) for reason in reasons]
    for error in (RunFailed("a reward is NaN"), PlanRejected("launcher.address: no cluster answers")):
        tried = Attempts(error)
        with pytest.raises(type(error)):
            with_restarts(tried, limit=3, folder=tmp_path, resume=None)
        assert len(tried.calls) == 1


def test_a_restart_takes_a_checkpoint_that_the_run_wrote_and_none_that_it_was_resumed_below(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        (checkpoints / f"step-{step:06d}").mkdir(parents=True)
    given, resumed = checkpoints / "step-000001", list[Path | None]()

    def attempt(resume: Path | None, findings: Sequence[str]) -> str:
        resumed.append(resume)
        if len(resumed) == 2:
            # As a checkpoint is replaced: the new folder is renamed to the name of the old one.
            (checkpoints / "step-000002").rename(checkpoints / "old")
            (checkpoints / "part").mkdir()
            (checkpoints / "part").rename(checkpoints / "step-000002")
        if len(resumed) < 4:
            raise ProcessLost(LOST)
        return "done"

    assert with_restarts(attempt, limit=3, folder=tmp_path, resume=given) == "done"
    written = checkpoints / "step-000002"
    assert resumed == [given, given, written, written]


@pytest.mark.parametrize("limit", [0, 2])
def test_the_last_loss_is_raised(tmp_path: Path, limit: int) -> None:
    tried = Attempts(*(ProcessLost(f"loss {number}") for number in range(limit + 1)))
    with pytest.raises(ProcessLost, match=f"loss {limit}"):
        with_restarts(tried, limit=limit, folder=tmp_path, resume=None)


def test_a_restart_waits_for_machines_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    few = [PlanRejected("launcher: 8 GPUs are needed, and 7 are there") for _ in range(100)]
    assert with_restarts(Attempts(ProcessLost(LOST), *few[:3], "done"), limit=1, folder=tmp_path, resume=None) == "done"
    assert now[0] == 3 * restarts.AGAIN_S
    tried = Attempts(ProcessLost(LOST), *few)
    with pytest.raises(PlanRejected, match="7 are there") as raised:
        with_restarts(tried, limit=1, folder=tmp_path, resume=None)
    assert raised.value.__notes__ == [f"After restart 1 of 1: {LOST}"]
    # The first failure of the restart, and one after each wait.
    assert len(tried.calls) == 2 + restarts.WAIT_S / restarts.AGAIN_S


def test_restarts_without_checkpoints_are_refused() -> None:
    (reason,) = match(plan("run.restarts=2", "run.save_every=0")).reasons
    assert reason.key == "run.restarts" and "run.save_every=0" in reason.text
    assert match(plan("run.restarts=2", "run.save_every=5")).accepted


def lost_at_the_end_of(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time that a run has trained in this step, counted from 1, a process is lost."""
    original, left = loop_step.train_step, [1]

    def train_step(*args: Any, step: int, **kwargs: Any) -> None:
        original(*args, step=step, **kwargs)
        if step + 1 == last and left:
            left.clear()
            raise ProcessLost(LOST)

    monkeypatch.setattr(loop_step, "train_step", train_step)


@pytest.mark.parametrize(("lost_at", "save_every", "resumed_at"), [(2, 1, 1), (1, 2, None)])
def test_a_run_that_lost_a_process_goes_on_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_at: int, save_every: int, resumed_at: int | None
) -> None:
    words = ("run.max_steps=2", "run.restarts=1", f"run.save_every={save_every}")
    whole = run(tmp_path / "whole", *words).folder
    lost_at_the_end_of(lost_at, monkeypatch)
    folder = run(tmp_path / "run", *words).folder
    assert steps(folder) == steps(whole)
    expected, result = tensors(whole, 2), tensors(folder, 2)
    assert expected.keys() == result.keys()
    for name, value in expected.items():
        assert value.equal(result[name]) if hasattr(value, "equal") else value == result[name], name
    # Without a checkpoint it begins again.
    assert [one["step"] for one in events(folder, "run_resumed")] == ([] if resumed_at is None else [resumed_at])
    (finding,) = events(folder, "finding")
    assert finding["text"] == f"restart 1 of 1: {LOST}" and finding["step"] == (resumed_at or 0)
