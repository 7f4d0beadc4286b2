"""Runs with `run.save_async`: the same files, written while later steps train, and stops and failures meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slow_disk import Disk, slow_disk
from small_runs import EVALUATED, catalog, copy_up_to, events, plan, run, steps
from unirl.core.errors import CheckpointError, RewardFailed
from unirl.core.types.event import Event
from unirl.loop.checkpoints import Checkpoints
from unirl.loop.run import RunResult, train
from unirl.train_host.checkpoint_metadata import read_metadata

pytestmark = pytest.mark.slow

ADAPTIVE = (
    *("backend.trains=lora", "backend.lr=1e-3", "backend.ema.kind=adaptive"),
    *("algorithm.kl_coef=0.1", "algorithm.kl_target=1e-3", "algorithm.kl_horizon=60"),
)
"""The algorithm has a state, the coefficient, which changes at each step."""
EACH = (*ADAPTIVE, "run.save_every=1", "run.save_async=true")


def checkpoint(folder: Path, step: int) -> dict[str, object]:
    """Contents of a checkpoint's files. DCP's metadata has an id of each save, and the manifest the checksum of it."""
    result: dict[str, object] = {}
    root = folder / "checkpoints" / f"step-{step:06d}"
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root))
        if path.name == ".metadata":
            result[name] = repr(dataclasses.replace(read_metadata(path.parent), storage_meta=None))
        elif path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            result[name] = [manifest["step"], manifest["state"], sorted(manifest["files"])]
        else:
            result[name] = path.read_bytes()
    return result


def listened(folder: Path, listener: Callable[[Event], None], *words: str) -> RunResult:
    return train(plan(f"run.dir={folder}", *words), catalog=catalog(), listeners=[listener])


def saved(folder: Path) -> list[int]:
    return [event["step"] for event in events(folder, "checkpoint_saved")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints are written while it waits."""
    words = (*ADAPTIVE, "run.save_every=1", "run.max_steps=4")
    return run(tmp_path_factory.mktemp("whole") / "run", *words).folder


@pytest.fixture
def disk() -> Iterator[Disk]:
    with slow_disk() as disk:
        yield disk


def test_a_checkpoint_is_of_its_boundary_whatever_trains_while_it_is_written(
    whole: Path, tmp_path: Path, disk: Disk
) -> None:
    """The disk is held from a boundary until the next step was taken; the save of that step waits for the one before."""
    held: list[int] = []

    def listener(event: Event) -> None:
        if event.kind == "step" and event.step < 4:
            if event.step > 1:
                disk.wait_until_reached()
                held.append(event.step - 1)
                assert not (tmp_path / "run" / "checkpoints" / f"step-{event.step - 1:06d}").exists()
                disk.release()
                while not (tmp_path / "run" / "checkpoints" / f"step-{event.step - 1:06d}").exists():
                    time.sleep(0.01)
            disk.hold()
        elif event.kind == "step":
            disk.release()

    result = listened(tmp_path / "run", listener, *EACH, "run.max_steps=4")
    assert (result.status, held, saved(result.folder)) == ("done", [1, 2], [1, 2, 3, 4])
    for step in (1, 2, 3, 4):
        assert checkpoint(result.folder, step) == checkpoint(whole, step)
    assert checkpoint(whole, 1)["manifest.json"] != checkpoint(whole, 2)["manifest.json"]
    resumed = run(tmp_path, *EACH, "run.max_steps=4", resume=copy_up_to(result.folder, 2, tmp_path / "parts"))
    assert checkpoint(resumed.folder, 4) == checkpoint(whole, 4)
    assert steps(resumed.folder) == steps(whole)


def test_the_event_has_the_seconds_that_the_run_waited_and_those_until_it_was_complete(
    whole: Path, tmp_path: Path, disk: Disk
) -> None:
    """The first save is held for half a second of the second step, and then for the rest until it is waited for."""

    def listener(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            disk.hold()
        elif event.kind == "step" and event.step == 2:
            disk.wait_until_reached()
            threading.Timer(0.5, disk.release).start()

    result = listened(tmp_path / "run", listener, *EACH, "run.max_steps=2", "run.keep=1")
    first, second = events(result.folder, "checkpoint_saved")
    # Reported at the next boundary, or when the next save has waited for it.
    assert [first["step"], second["step"]] == [1, 2]
    assert 0.4 < first["stalled_s"] < first["seconds"]
    assert 0 < second["stalled_s"] <= second["seconds"]
    (kept,) = (result.folder / "checkpoints").iterdir()
    assert kept.name == "step-000002"
    assert second["size_bytes"] == sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    assert all(event["stalled_s"] == event["seconds"] for event in events(whole, "checkpoint_saved"))


def test_a_write_that_fails_ends_the_run_at_the_next_boundary_with_what_is_intact(tmp_path: Path, disk: Disk) -> None:
    def listener(event: Event) -> None:
        if event.kind == "step" and event.step == 2:
            disk.error = OSError(errno.ENOSPC, "No space left on device")

    text = (
        r"step-000002: the checkpoint could not be written: No space left on device\. Earlier checkpoints are intact: "
    )
    with pytest.raises(CheckpointError, match=text + r"step-000001\. When it failed, ") as caught:
        listened(tmp_path / "run", listener, *EACH, "run.max_steps=9")
    assert any("Completed steps are saved; resume with" in note for note in caught.value.__notes__)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert max(steps(tmp_path / "run")) == 3 and saved(tmp_path / "run") == [1]
    (finished,) = events(tmp_path / "run", "run_finished")
    assert finished["status"] == "failed" and "No space left on device" in finished["error"]
    disk.error = None
    assert run(tmp_path, *EACH, "run.max_steps=3", resume=tmp_path / "run").status == "done"


@pytest.mark.parametrize("ends", ["last", "failed"])
def test_a_write_that_fails_after_the_last_step_or_beside_another_failure_is_told(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    from unirl.core.roles import ScoreInput, Scores
    from unirl.rewards.rules.brightness import BrightnessReward

    score = BrightnessReward.score

    def listener(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            disk.error = OSError(errno.EDQUOT, "Disk quota exceeded")
            if ends == "failed":
                disk.hold()

    def breaks(self: BrightnessReward, samples: ScoreInput) -> Scores:
        if disk.error is None:
            return score(self, samples)
        disk.release()
        return Scores(values=score(self, samples).values * float("nan"))

    monkeypatch.setattr(BrightnessReward, "score", breaks)
    words = (*EACH, f"run.max_steps={1 if ends == 'last' else 2}")
    with pytest.raises(CheckpointError if ends == "last" else RewardFailed) as caught:
        listened(tmp_path / "run", listener, *words)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert (
        "step-000001: the checkpoint could not be written: Disk quota exceeded. Earlier checkpoints are intact: none"
        in (text)
    )
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_waits_for_the_save_in_flight_and_saves_the_last_boundary(
    whole: Path, tmp_path: Path, disk: Disk, number: signal.Signals
) -> None:
    def listener(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            disk.hold()
        elif event.kind == "step" and event.step == 2:
            disk.wait_until_reached()
            os.kill(os.getpid(), number)
            threading.Timer(0.3, disk.release).start()

    words = (*ADAPTIVE, "run.save_async=true", "run.max_steps=4", "run.save_every=1")
    result = listened(tmp_path / "run", listener, *words)
    assert (result.status, result.step, saved(result.folder)) == ("stopped", 2, [1, 2])
    for step in (1, 2):
        assert checkpoint(result.folder, step) == checkpoint(whole, step)


KILLED = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from slow_disk import slow_disk
from small_runs import catalog, plan
from unirl.loop.run import train

with slow_disk() as disk:
    def listener(event):
        if event.kind == "step" and event.step == 2:
            disk.hold()
        elif event.kind == "step" and event.step == 3:
            disk.wait_until_reached()
            print("in flight", flush=True)
            disk._is_free.wait()

    train(plan(*sys.argv[2:]), catalog=catalog(), listeners=[listener])
"""


def test_a_run_that_is_killed_during_a_write_continues_from_the_checkpoint_before(whole: Path, tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path / 'run'}", *EACH, "run.max_steps=4"]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(Path(__file__).with_name("support")), *words],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "in flight\n" in iter(process.stdout.readline, "")
        finally:
            process.kill()
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".part-step-000002", "step-000001"]
    assert Checkpoints(folder).load().step == 1
    result = run(tmp_path, *EACH, "run.max_steps=4", resume=tmp_path / "run")
    assert (result.status, result.step) == ("done", 4)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    assert checkpoint(result.folder, 4) == checkpoint(whole, 4)


def test_exports_during_a_write_have_the_weights_of_their_step(tmp_path: Path, disk: Disk) -> None:
    def listener(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            disk.hold()
        elif event.kind == "exported" and event.step == 2:
            disk.wait_until_reached()
            disk.release()

    words = ("run.max_steps=2", "run.export_every=1", *EVALUATED)
    result = listened(tmp_path / "run", listener, *EACH, *words)
    other = run(tmp_path / "sync", *ADAPTIVE, "run.save_every=1", *words)
    for step in (1, 2):
        here, there = (
            load_exported(folder / "exports" / f"step-{step:06d}") for folder in (result.folder, other.folder)
        )
        assert here.keys() == there.keys() and here
        assert all(torch.equal(here[name], there[name]) for name in there)


def load_exported(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.rglob("*.safetensors")
    return load_file(file)
