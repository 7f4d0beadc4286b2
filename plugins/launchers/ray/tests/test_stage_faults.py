"""Workers that die or hang while the second stage of a rollout is made, scored or fetched."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fault_runs import last_good_step, still_alive, strike
from small_runs import catalog, events, steps, tensors
from unirl.core.errors import RunFailed
from unirl.launchers.ray import cluster
from unirl.loop.run import train
from writer_and_painter import JOINT, RECIPE, composed

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

WORDS = (
    *JOINT,
    "launcher=ray",
    "launcher.placement=separate",
    "launcher.rollout_workers=2",
    "run.max_steps=2",
    "run.save_every=1",
    "run.keep=0",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)


def run(folder: Path, *words: str, resume: Path | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    recipe = folder / "writer.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    plan = composed(recipe, *WORDS, *words, f"run.dir={folder / 'run'}")
    train(plan, catalog=catalog(), resume=resume)
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_here: None) -> Path:
    """A run that nothing happens to."""
    return run(tmp_path_factory.mktemp("whole"))


def assert_same_run(left: Path, right: Path) -> None:
    """Bit for bit: the same ranks, and noise that depends on the sample alone. Each step is told once."""

    def told(folder: Path) -> dict[int, dict[str, Any]]:
        traffic = ("driver/", "sync/")
        return {
            step: {key: value for key, value in own.items() if not key.startswith(traffic)}
            for step, own in steps(folder).items()
        }

    assert told(left) == told(right)
    assert [event["samples"] for event in events(left, "step")] == [event["samples"] for event in events(right, "step")]
    expected, result = tensors(left, 2), tensors(right, 2)
    assert expected.keys() == result.keys()
    for name, value in expected.items():
        assert value.equal(result[name]) if hasattr(value, "equal") else value == result[name], name


def test_a_worker_tells_how_many_texts_its_painter_cuts(whole: Path) -> None:
    assert all(0 <= metrics["image/cut_texts"] <= 1 for metrics in steps(whole).values()) and len(steps(whole)) == 2


@pytest.mark.parametrize("phase", ["generate", "score", "fetch"])
def test_a_worker_killed_in_the_second_stage_is_replaced_and_the_numbers_stay(
    whole: Path, tmp_path: Path, phase: str
) -> None:
    with strike("rollout", phase, stage="image" if phase == "generate" else "") as struck:
        folder = run(tmp_path)
    (finding,) = events(folder, "finding")
    assert f"worker '{struck.worker}' (host {os.uname().nodename}, process {struck.pid})" in finding["text"]
    assert "died" in finding["text"] and "repeats its work" in finding["text"]
    assert_same_run(whole, folder)
    assert not still_alive(struck.all_pids)


def test_a_worker_that_hangs_in_the_second_stage_is_replaced_and_the_numbers_stay(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SIGN_WITHIN_S", 2.5)
    with strike("rollout", "generate", how=signal.SIGSTOP, stage="image") as struck:
        folder = run(tmp_path)
    (finding,) = events(folder, "finding")
    assert (
        f"worker '{struck.worker}' (host {os.uname().nodename}, process {struck.pid}) did not answer" in finding["text"]
    )
    assert_same_run(whole, folder)
    assert not still_alive(struck.all_pids)


def test_without_retries_the_run_ends_and_resumes_as_if_nothing_happened(whole: Path, tmp_path: Path) -> None:
    with strike("rollout", "generate", stage="image") as struck, pytest.raises(RunFailed) as caught:
        run(tmp_path, "launcher.retries=0")
    assert f"worker '{struck.worker}'" in str(caught.value) and "phase 'generate'" in str(caught.value)
    folder = tmp_path / "run"
    assert last_good_step(folder) == 1
    run(tmp_path, resume=folder)
    assert_same_run(whole, folder)
