"""A league that runs: who takes part, what is kept, and what a failure looks like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.league import league
from unirl.league.budget import Budget
from unirl.league.league import chosen, read_settings, run_all
from unirl.league.run import Job

SMALL = [
    "data.prompts_per_step=2",
    "data.samples_per_prompt=4",
    "eval.num_prompts=4",
    "eval.samples_per_prompt=1",
]


TUNING = ["--tune", "backend.lr=3e-5,1e-4", "--algorithms", "awm,diffusion-dpo", "--budget", "2steps", "--evals", "1"]


def job(algorithm: str = "awm", **changed: Any) -> Job:
    budget = Budget(amount=2, unit="steps")
    given = {"algorithm": algorithm, "seed": 0, "overrides": (), "budget": budget, "intervals": 2, "score": "reward/x"}
    return Job(recipe="quickstart", **{**given, **changed})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Algorithms of the processes that are started; each writes a result in place of training. The score is 1 at a
    learning rate of 1e-4, and 0 at others."""
    names: list[str] = []

    def run(file: Path, output: Path) -> int:
        given = json.loads(file.read_text())
        name = given["algorithm"]
        names.append(name)
        if name == "killed":
            output.write_bytes(b"loading\nKilled\n")
            return -9
        status = {"status": "failed", "error": "broken"} if name == "fails" else {"status": "done", "error": ""}
        costs = {key: 2.0 for key in ("steps", "samples", "forwards", "backwards", "cpu_s", "wall_s")}
        score = float("backend.lr=1e-4" in given["overrides"])
        point = {**costs, "metrics": {given["score"]: score}, "distance": 0.0, "kl": None}
        (file.parent / "result.json").write_text(json.dumps({**status, "points": [point], "peak_memory_mib": 1.0}))
        return 0

    monkeypatch.setattr(league, "run_process", run)
    return names


def league_command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["league", "quickstart", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_finished_runs_are_kept_and_failed_ones_are_run_again_on_request(tmp_path: Path, started: list[str]) -> None:
    jobs = [job("works"), job("fails"), job("killed")]
    records = run_all(jobs, tmp_path, again=False, said=lambda text: None)
    assert [record["status"] for record in records] == ["done", "failed", "failed"]
    assert records[2]["error"] == "the process ended with code -9; its last line: Killed"
    assert run_all(jobs, tmp_path, again=False, said=lambda text: None) == records
    assert started == ["works", "fails", "killed"]
    run_all(jobs, tmp_path, again=True, said=lambda text: None)
    assert started[3:] == ["fails", "killed"]


def test_an_interrupted_run_is_done_again_from_its_start(tmp_path: Path, started: list[str]) -> None:
    where = tmp_path / "runs" / "works-0"
    where.mkdir(parents=True)
    (where / "job.json").write_text("{}")
    (where / "events.jsonl").write_text('{"kind":"step"')
    (record,) = run_all([job("works")], tmp_path, again=False, said=lambda text: None)
    assert record["status"] == "done" and started == ["works"]
    assert not (where / "events.jsonl").exists()


def test_a_folder_of_a_league_with_other_settings_is_refused(tmp_path: Path, started: list[str]) -> None:
    run_all([job("works")], tmp_path, again=False, said=lambda text: None)
    for other in (job("works", intervals=3), job("works", overrides=("backend.lr=1",))):
        with pytest.raises(RecipeError, match="holds a run with other settings"):
            run_all([other], tmp_path, again=False, said=lambda text: None)


def test_algorithms_that_do_not_fit_are_listed_with_the_words_of_the_match() -> None:
    catalog = Catalog.discover()
    own = {"drtune": ["reward@reward.shapes=soft-shapes"]}
    entries = chosen("quickstart", "drtune,grpo,draft", lambda name: own.get(name, []), catalog=catalog)
    assert entries.algorithms == ("drtune",)
    assert "algorithm 'grpo' trains text tracks" in entries.refused["grpo"]
    assert "reward@reward.shapes=soft-shapes" in entries.refused["draft"]
    with pytest.raises(RecipeError, match=r"--algorithms: 'drtunes' is not installed; did you mean 'drtune'\?"):
        chosen("quickstart", "drtunes", lambda name: [], catalog=catalog)


def test_the_settings_come_with_the_recipe_or_from_a_file(tmp_path: Path) -> None:
    settings = read_settings("quickstart", None)
    assert settings.score == "reward/shapes"
    assert "+reward@reward.soft=soft-shapes" in settings.algorithms["drtune"]
    file = tmp_path / "own.yaml"
    file.write_text("quickstart: {overrides: [train.updates_per_step=1], algorithms: {awm: [backend.lr=1e-3]}}")
    own = read_settings("quickstart", file)
    assert (own.overrides, own.algorithms) == (("train.updates_per_step=1",), {"awm": ("backend.lr=1e-3",)})
    for text in (
        "quickstart: {tuned: {seeds: [a]}}",
        "quickstart: {tuned: {budget: 2 steps}}",
        "quickstart: {algorithm: {}}",
        "quickstart: 3",
        "- a",
        "quickstart: {algorithms: {awm: 3}}",
    ):
        file.write_text(text)
        with pytest.raises(RecipeError, match=r"own\.yaml"):
            read_settings("quickstart", file)


@pytest.mark.slow
def test_two_algorithms_run_two_steps_and_a_third_one_fails_in_sight(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = "awm: +reward@reward.bad=function reward.bad.target=nowhere:score"
    command = ["league", "quickstart", *SMALL, "--algorithms", "flow-grpo,drtune,awm,grpo", "--seeds", "1"]
    command += ["--budget", "2steps", "--evals", "2", "--with", broken, "--dir", str(tmp_path), "--allow-code"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1
    content = json.loads((tmp_path / "league.json").read_text())
    runs = {run["algorithm"]: run for run in content["runs"]}
    assert {name: run["status"] for name, run in runs.items()} == {
        "flow-grpo": "done",
        "drtune": "done",
        "awm": "failed",
    }
    assert "nowhere" in runs["awm"]["error"] and "grpo" in content["refused"]
    points = runs["flow-grpo"]["points"]
    assert [point["steps"] for point in points] == [0, 1, 2] and [point["samples"] for point in points] == [0, 8, 16]
    # 8 samples x 10 steps of the rollout; of the 5 SDE steps each has one pass for the old log-probs and one to train,
    # but for the first of two updates of the second step, whose 4 samples have the one to train alone.
    assert [point["forwards"] for point in points] == [0, 160, 160 + 160 - 4 * 5]
    assert [point["backwards"] for point in points] == [0, 40, 80]
    # Three steps of each sample have a gradient, and are computed once more.
    assert runs["drtune"]["points"][-1]["forwards"] == 2 * 8 * (10 + 3)
    assert runs["drtune"]["points"][-1]["backwards"] == 2 * 8 * 3
    for name in ("flow-grpo", "drtune"):
        # The same weights replay a sample bit for bit, so the KL at the start is 0 and not almost 0.
        assert [point["kl"] > 0 for point in runs[name]["points"]] == [False, True, True]
        assert runs[name]["points"][0]["kl"] == 0
        assert [point["distance"] > 0 for point in runs[name]["points"]] == [False, True, True]
        assert all("reward/shapes" in point["metrics"] for point in runs[name]["points"])
    assert (tmp_path / "LEAGUE.md").is_file() and (tmp_path / "league.html").is_file()
    assert "seed 0: " in (tmp_path / "LEAGUE.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("budget", [Budget(amount=1, unit="samples"), Budget(amount=1e-3, unit="s")])
def test_a_budget_smaller_than_a_step_takes_one_step(tmp_path: Path, budget: Budget) -> None:
    """In the process of a run itself, which is told of the job by a file."""
    one = job("awm", overrides=tuple(SMALL), budget=budget, score="reward/shapes")
    (record,) = run_all([one], tmp_path, again=False, said=lambda text: None)
    assert record["status"] == "done", record
    assert [point["steps"] for point in record["points"]] == [0, 1]


@pytest.mark.slow
def test_a_league_that_was_killed_goes_on_with_the_run_that_was_cut_off(tmp_path: Path) -> None:
    words = [
        "league",
        "quickstart",
        *SMALL,
        "--algorithms",
        "awm",
        "--seeds",
        "1",
        "--budget",
        "1steps",
        "--evals",
        "1",
    ]
    words += ["--dir", str(tmp_path)]
    command = [sys.executable, "-m", "unirl.core", *words]
    where = tmp_path / "runs" / "awm-0"
    # In a separate process group, so that the run ends with its league as at Ctrl-C.
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as first:
        while not (where / "events.jsonl").exists():
            assert first.poll() is None, "the league ended before its run began"
            time.sleep(0.02)
        os.killpg(first.pid, signal.SIGKILL)
    assert not (where / "result.json").exists() and not (tmp_path / "league.json").exists()
    ended: list[int] = []
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        ended.append((where / "result.json").stat().st_mtime_ns)
        (record,) = json.loads((tmp_path / "league.json").read_text())["runs"]
        assert [point["steps"] for point in record["points"]] == [0, 1]
    # The second time nothing ran.
    assert ended[0] == ended[1]
    events = [json.loads(line)["kind"] for line in (where / "events.jsonl").read_text().splitlines()]
    assert events.count("step") == 1


def test_the_command_names_what_it_cannot_use(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, expected in (
        (["--budget", "soon"], "--budget: got 'soon'"),
        (["--budget", "2steps", "--with", "awm"], "--with: got 'awm', expected"),
        (["--budget", "2steps", "--algorithms", "grpo"], "no algorithm is left"),
    ):
        assert league_command(*words) != 0 and expected in capfd.readouterr().err


def test_tuning_writes_the_best_value_of_each_algorithm_and_a_league_takes_other_seeds(
    tmp_path: Path, started: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--dir", str(tmp_path / "tuning")]
    assert league_command(*TUNING, *where, "--seeds", "2") == 0
    # Two algorithms, two seeds, two values; again, and nothing runs.
    assert len(started) == 8
    assert league_command(*TUNING, *where, "--seeds", "2") == 0
    assert len(started) == 8
    file = tmp_path / "tuning" / "settings.yaml"
    settings = read_settings("quickstart", file)
    assert settings.tuned["seeds"] == [1000, 1001] and settings.tuned["budget"] == "2 steps for each run"
    assert settings.tuned["grid"] == ["backend.lr=3e-5", "backend.lr=1e-4"]
    assert settings.tuned["scores"]["awm"] == {"backend.lr=3e-5": 0.0, "backend.lr=1e-4": 1.0}
    assert settings.overrides == read_settings("quickstart", None).overrides
    assert settings.algorithms["awm"] == ("backend.lr=1e-4",)
    assert set(settings.algorithms["diffusion-dpo"]) > {"algorithm.beta=200.0", "backend.lr=1e-4"}

    report = ["--settings", str(file), "--algorithms", "awm", "--budget", "2steps", "--dir", str(tmp_path / "league")]
    assert league_command(*report, "--first-seed", "999") == 2
    assert "--first-seed: seed 1000 chose the settings" in capfd.readouterr().err
    assert league_command(*report) == 0
    content = json.loads((tmp_path / "league" / "league.json").read_text())
    assert content["overrides of one"] == {"awm": ["backend.lr=1e-4"]} and content["seeds"] == [0, 1, 2]
    assert content["tuned"]["grid"] == settings.tuned["grid"]


def test_a_grid_that_cannot_be_tuned_is_refused(started: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for grid, expected in (
        ("backend.lr=1e-4", "--tune: got 'backend.lr=1e-4', expected a key and two or more values"),
        ("backend.lr=1e-4,1e-4", "expected a key and two or more values"),
        ("backend.rate=1,2", "--tune: backend.rate=1 does not fit awm: "),
    ):
        assert league_command("--algorithms", "awm", "--budget", "2steps", "--tune", grid) == 2
        assert expected in capfd.readouterr().err
    assert not started
