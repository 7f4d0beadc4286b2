"""Saves beside the steps: in order, one at a time, of their boundary, and never lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from loop_toy import ToyAlgorithm, ToyBackend, parts, passed, plan
from unirl.core.data.run_data import RunData
from unirl.core.errors import CheckpointError, RunFailed
from unirl.core.observe.events import EventStream
from unirl.core.types.event import Event
from unirl.loop.checkpoints import Checkpoints
from unirl.loop.saves import Saves

DATA = RunData(prompts=(), held_out=(), hashes={})


class Stored(ToyBackend):
    """Writes its weight, as any backend; without copies."""

    def save(self, folder: Path) -> None:
        self.write(folder, self.weight)

    def snapshot(self) -> Callable[[Path], None] | None:
        return None

    def write(self, folder: Path, weight: float) -> None:
        (folder / "weight").write_text(str(weight))


class Copied(Stored):
    """Copies its weight, and writes it once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.writes = threading.Event(), list[str]()
        self.error: OSError | None = None

    def snapshot(self) -> Callable[[Path], None]:
        weight = self.weight

        def write(folder: Path) -> None:
            passed(self.may_write)
            if self.error is not None:
                raise self.error
            self.writes.append(threading.current_thread().name)
            self.write(folder, weight)

        return write


class Counting(ToyAlgorithm):
    """Its state changes in place."""

    def __init__(self) -> None:
        self.numbers = [0]

    def state(self) -> Mapping[str, Any]:
        return {"numbers": self.numbers}


class Run:
    def __init__(self, folder: Path, backend: Any, *, keep: int = 2, algorithm: Any = None) -> None:
        self.backend, self.seen, events = backend, list[Event](), EventStream()
        events.listen(self.seen.append)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=keep)
        self.saves = Saves(
            plan(run={"save_async": True}),
            self.checkpoints,
            data=DATA,
            parts=parts(backend=backend, algorithm=algorithm),
            events=events,
        )

    def saved(self) -> list[int]:
        return [event.step for event in self.seen if event.kind == "checkpoint_saved"]

    def weight(self, step: int) -> str:
        return (self.checkpoints.at(step) / "backend" / "weight").read_text()


def test_a_backend_without_copies_is_saved_while_the_run_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, Stored())
    with run.saves as saves:
        saves.save(1)
        assert run.saved() == [1] and run.checkpoints.load().step == 1
        saves.save(2)
    finding, *saved = run.seen
    text = "run.save_async: the backend makes no snapshots, so the run waits for each save"
    assert (finding.kind, finding.data["text"]) == ("finding", text)
    assert [event.kind for event in saved] == ["checkpoint_saved"] * 2
    assert all(event.data["stalled_s"] == event.data["seconds"] > 0 for event in saved)


def test_the_copy_is_written_beside_the_run_and_told_once_it_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, Copied())
    with run.saves as saves:
        run.backend.weight = 1.0
        saves.save(1)
        run.backend.weight = 2.0
        saves.check()
        assert run.saved() == [] and run.checkpoints.steps() == []
        run.backend.may_write.set()
        saves.wait()
        assert run.saved() == [1] and run.weight(1) == "1.0"
        saves.wait()
        saves.check()
    assert run.saved() == [1] and run.backend.writes == ["checkpoint"]


def test_a_save_waits_for_the_one_before_it_and_only_complete_ones_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, Copied(), keep=1)
    with run.saves as saves:
        run.backend.may_write.set()
        saves.save(1)
        saves.wait()
        run.backend.may_write.clear()
        saves.save(2)
        # The one in flight does not count.
        assert run.checkpoints.steps() == [1]
        threading.Timer(0.1, run.backend.may_write.set).start()
        saves.save(3)
        assert run.saved() == [1, 2]
    assert run.saved() == [1, 2, 3] and run.checkpoints.steps() == [3]


def test_the_state_is_that_of_the_boundary(tmp_path: Path) -> None:
    algorithm = Counting()
    run = Run(tmp_path, Copied(), algorithm=algorithm)
    with run.saves as saves:
        saves.save(1)
        algorithm.numbers.append(1)
        run.backend.may_write.set()
    assert run.checkpoints.load().state["algorithms"] == {"image": {"numbers": [0]}}
    assert json.loads((run.checkpoints.at(1) / "manifest.json").read_text())["step"] == 1


FULL = (
    r"step-000001: the checkpoint could not be written: No space left on device\. Earlier checkpoints are intact: none"
)


@pytest.mark.parametrize("where", ["check", "wait", "save", "end"])
def test_a_write_that_failed_is_raised_by_whatever_comes_next_and_once(tmp_path: Path, where: str) -> None:
    run = Run(tmp_path, Copied())
    run.backend.error = OSError(28, "No space left on device")
    with pytest.raises(CheckpointError, match=FULL) as caught, run.saves as saves:
        saves.save(1)
        run.backend.may_write.set()
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        if where != "end":
            getattr(saves, where)(*([2] if where == "save" else []))
    assert run.saved() == [] and list(run.checkpoints.folder.iterdir()) == []
    assert not hasattr(caught.value, "__notes__")
    # Nothing is in flight any more.
    run.saves.wait()


def test_a_write_that_fails_beside_another_failure_is_a_note_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, Copied())
    run.backend.error = OSError(28, "No space left on device")
    failure = RunFailed("reward: nothing came.")
    with pytest.raises(RunFailed, match="nothing came") as caught, run.saves as saves:
        saves.save(1)
        run.backend.may_write.set()
        raise failure
    assert caught.value is failure and "No space left on device" in "\n".join(failure.__notes__)


def test_a_copy_that_fails_names_the_backend(tmp_path: Path) -> None:
    class Small(Stored):
        def snapshot(self) -> Callable[[Path], None] | None:
            raise MemoryError("no room for a copy")

    run = Run(tmp_path, Small())
    with pytest.raises(RunFailed, match="backend failed in phase 'checkpoint': MemoryError: no room for a copy"):
        run.saves.save(1)
    assert run.saved() == []
