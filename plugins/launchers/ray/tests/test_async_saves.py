"""Checkpoints that workers write beside their other calls (`run.save_async`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
from fault_runs import APART, last_good_step, still_alive
from small_runs import events, run, steps, tensors
from unirl.core.errors import RunFailed
from unirl.launchers.ray.actors import Call
from unirl.launchers.ray.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

RANKS = (*APART, "launcher.train_ranks=2")
TOGETHER = ("launcher=ray", "launcher.placement=colocate", "run.max_steps=2", "run.save_every=1")
ASYNC = ("run.save_async=true",)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.own():
        yield


@pytest.fixture(scope="module")
def of_two_ranks(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that waits for its writes."""
    return run(tmp_path_factory.mktemp("whole") / "run", *RANKS).folder


def assert_same_run(left: Path, right: Path) -> None:
    for step in (1, 2):
        expected, result = tensors(left, step), tensors(right, step)
        assert expected.keys() == result.keys()
        assert all(value.equal(result[name]) for name, value in expected.items() if hasattr(value, "equal"))
    assert all(
        value == steps(right)[step][name]
        for step, metrics in steps(left).items()
        for name, value in metrics.items()
        if "/" not in name or name.startswith("reward")
    )


@pytest.mark.parametrize("words", [RANKS, TOGETHER], ids=["two ranks", "colocated"])
def test_ranks_write_a_boundary_while_they_train_the_next_step(
    of_two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The first write begins once the ranks were told to train again, so the weights on them are newer when it ends."""
    whole = of_two_ranks if words is RANKS else run(tmp_path / "sync", *words).folder
    sent, order, trains = Cluster._sent, list[str](), threading.Event()

    def sent_late(cluster: Cluster, call: Call) -> Any:
        if call.method == "write_snapshot":
            assert trains.wait(60), "the second step was not trained"
            assert call.is_background
        ref = sent(cluster, call)
        if call.method in ("train", "snapshot", "write_snapshot"):
            if call.method == "train" and "snapshot" in order:
                trains.set()
            order.append(call.method)
        return ref

    monkeypatch.setattr(Cluster, "_sent", sent_late)
    result = run(tmp_path / "async", *words, *ASYNC)
    ranks = 2 if words is RANKS else 1
    assert order.index("write_snapshot") > order.index("snapshot") + ranks
    assert (order[: 2 * ranks], order[2 * ranks]) == (["train"] * ranks + ["snapshot"] * ranks, "train")
    assert order[-ranks:] == ["write_snapshot"] * ranks
    assert [event["step"] for event in events(result.folder, "checkpoint_saved")] == [1, 2]
    assert_same_run(whole, result.folder)


def test_a_rank_that_dies_while_it_writes_ends_the_run_which_resumes_from_the_checkpoint_before(
    of_two_ranks: Path, tmp_path: Path
) -> None:
    sent, writes, pids = Cluster._sent, list[str](), set[int]()
    victim: Any = None

    def sent_and_struck(cluster: Cluster, call: Call) -> Any:
        nonlocal victim
        strikes = (
            call.method == "write_snapshot" and writes.count(call.actor.name) == 1 and call.actor.name == "train-1"
        )
        if call.method == "write_snapshot":
            writes.append(call.actor.name)
        if strikes:
            victim = call.actor
            os.kill(victim.facts.pid, signal.SIGSTOP)
        ref = sent(cluster, call)
        pids.update(actor.facts.pid for actor in cluster._actors)
        if strikes:
            os.kill(victim.facts.pid, signal.SIGKILL)
        return ref

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed) as caught:
        patch.setattr(Cluster, "_sent", sent_and_struck)
        run(tmp_path / "run", *RANKS, *ASYNC)
    assert f"worker 'train-1' (host {os.uname().nodename}, process {victim.facts.pid})" in str(caught.value)
    assert "phase 'checkpoint'" in str(caught.value)
    assert any("step-000002: the checkpoint was not written. Earlier" in note for note in caught.value.__notes__)
    assert not still_alive(pids)
    assert last_good_step(tmp_path / "run") == 1
    assert run(tmp_path, *RANKS, *ASYNC, resume=tmp_path / "run").status == "done"
    assert_same_run(of_two_ranks, tmp_path / "run")
