"""`unirl bench`: what is measured, how results are stored and compared, and what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from unirl.core.cli import main
from unirl.core.errors import RunFolderError
from unirl.tools.bench.command import _environment
from unirl.tools.bench.measure import measure
from unirl.tools.bench.report import compare, comparison, page, report
from unirl.tools.bench.results import RESULTS, Results, Run, Step, Subject, load, save

SUBJECT = Subject(
    name="image",
    recipe="quickstart",
    overrides=("run.threads=1",),
    plan_hash="abc",
    warmup=1,
    planned_bytes=2**20,
    flops={"generate": 1e12, "train": 4e12},
    peak_tflops=8.0,
)


def run(seconds: list[float], *, workload: str = "image", repeat: int = 0, **changes: Any) -> Run:
    steps = tuple(
        Step(
            seconds=each,
            samples=10,
            phases={"generate": each / 4, "train": each * 3 / 4},
            metrics={"logp_mismatch_max": 1e-6, "perf/media_bytes": 1024.0, "perf/train_tflops": 1.0},
        )
        for each in seconds
    )
    return Run(workload=workload, seed=repeat, repeat=repeat, steps=steps, peak_bytes=2**21, device="cpu", **changes)


def results(*runs: Run, **changes: Any) -> Results:
    subject = dataclasses.replace(SUBJECT, **changes)
    return Results(environment={"cpu": "one", "torch": "2"}, subjects=(subject,), runs=runs)


def table(text: str, first: str) -> list[dict[str, str]]:
    """The rows of the table of Markdown whose first column has this heading."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    start = next(place for place, row in enumerate(rows) if row[0] == first)
    width = len(rows[start])
    found: list[dict[str, str]] = []
    for row in rows[start + 2 :]:
        if len(row) != width:
            break
        found.append(dict(zip(rows[start], row, strict=True)))
    return found


def test_the_report_has_medians_shares_and_rates_by_formula() -> None:
    text = report(results(run([1.0, 2.0, 9.0]), run([4.0, 4.0, 4.0], repeat=1)))
    (row,) = table(text, "workload")
    # Medians of the runs are 2 and 4; 10 samples in steps of 1, 2, 4, 4, 4 and 9 seconds.
    assert row["s/step"] == "3.000 (2.000 to 4.000)" and row["samples/s"] == "2.5"
    assert (row["peak memory"], row["planned"], row["bytes moved"]) == ("2.0 MiB", "1.0 MiB", "1.0 KiB")
    # The median step of 4 s: 1e12 operations in 1 s, and 4e12 in 3 s, of a peak of 8e12.
    assert row["TFLOP/s"] == "generate 1, train 1.33, MFU 16.7%" and row["log-prob mismatch"] == "1e-06"
    assert [(one["phase"], one["s/step"], one["share"]) for one in table(text, "phase")] == [
        ("train", "3.000", "75.0%"),
        ("generate", "1.000", "25.0%"),
    ]


def test_a_profiled_run_lists_operations_and_counts_for_nothing() -> None:
    operations = ({"name": "aten::mm", "seconds": 0.5, "share": 0.25},)
    text = report(results(run([1.0]), run([100.0], repeat=1, is_profiled=True), operations=operations))
    assert table(text, "workload")[0]["s/step"] == "1.000 (1.000 to 1.000)"
    assert table(text, "operation") == [{"operation": "`aten::mm`", "seconds": "0.500", "share": "25.0%"}]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.5, "faster"), (2.0, "slower"), (1.0, "no difference seen"), (1.01, "no difference seen")]
)
def test_a_change_is_called_one_when_it_is_larger_than_the_noise(factor: float, verdict: str) -> None:
    """Runs differ by 10 %, as on a shared machine, and their steps by 2 %."""
    runs = [[base + 0.01 * step for step in range(3)] for base in (1.0, 1.05, 1.1)]
    before = results(*(run(steps, repeat=place) for place, steps in enumerate(runs)))
    after = results(*(run([one * factor for one in steps], repeat=place) for place, steps in enumerate(runs)))
    (change,) = compare(before, after)
    assert change.verdict == verdict and change.after / change.before == pytest.approx(factor)
    # Whatever is drawn lies between the smallest and the largest step of each.
    assert factor * 1.0 / 1.12 <= change.low <= factor <= change.high <= factor * 1.12 / 1.0
    assert verdict in comparison(before, after, [change])


def test_a_constant_time_has_an_interval_without_width() -> None:
    (change,) = compare(results(run([2.0, 2.0])), results(run([3.0, 3.0])))
    assert (change.low, change.high, change.verdict) == (1.5, 1.5, "slower")


def test_other_recipes_missing_workloads_and_other_machines_are_named() -> None:
    before, after = results(run([1.0])), results(run([1.0]), plan_hash="other", overrides=("backend.lr=1",))
    changes = compare(before, after)
    text = comparison(before, dataclasses.replace(after, environment={"cpu": "two", "torch": "2"}), changes)
    assert [one.workload for one in changes] == ["image"]
    assert "image: the recipes differ in what they compute: `quickstart run.threads=1` before, " in text
    assert "`quickstart backend.lr=1` after." in text and "cpu: one before, two after." in text and "torch" not in text
    renamed = results(run([1.0], workload="text"), name="text")
    assert compare(before, renamed) == []
    text = comparison(before, renamed, [])
    assert "image: not compared, one of the two lacks it." in text and "text: not compared" in text


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = results(run([1.0, 2.0]), run([3.0], repeat=1, is_profiled=True), planned_bytes=None, peak_tflops=None)
    save(written, tmp_path)
    assert load(tmp_path) == written
    lines = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["bench", "workload", "run", "run"] and lines[0]["schema"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"schema": 1', '"schema": 2'), "results.jsonl:1: got schema 2, this version reads 1"),
        (('"kind": "bench"', '"kind": "step"'), "got no line of the kind 'bench'"),
        (('"samples": 10', '"samples": -1'), "results.jsonl:3: steps[0].samples: got -1, expected a whole number"),
        (('"seconds": 1.0', '"seconds": "long"'), "steps[0].seconds: got 'long', expected a number"),
        (("{", "["), "cannot be read"),
    ],
)
def test_damaged_results_are_refused_with_line_and_key(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    save(results(run([1.0])), tmp_path)
    file = tmp_path / RESULTS
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(RunFolderError, match=re.escape(says)):
        load(tmp_path)
    with pytest.raises(RunFolderError, match="expected a folder that `unirl bench --to` wrote"):
        load(tmp_path / "none")


def test_the_page_has_the_tables_of_the_report_and_shows_texts_as_they_are() -> None:
    text = report(results(run([1.0]), overrides=("run.name='<b>|x'",)))
    shown = page(text)
    assert shown.count("<table>") == 3 and shown.count("<h2>") == 1
    assert "<b>" not in shown and "&lt;b&gt;|x" in shown and "http" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["image"], "--to: give a new folder"),
        (["image", "--to", "."], "--to: . exists already"),
        (["imag", "--to", "new"], "imag"),
        (["image", "run.seed=3", "--to", "new"], "run.seed=3: `unirl bench` sets it itself"),
        (["image", "+run.max_steps=3", "--to", "new"], "run.max_steps=3: `unirl bench` sets it itself"),
        (["image", "sampling.stepz=3", "--to", "new"], "stepz"),
        (["--compare", "one"], "--compare takes two folders"),
        (["--compare", "one", "two"], "expected a folder that `unirl bench --to` wrote"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == (1 if words[-1] == "two" else 2) and says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_environment_lists_the_packages_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "diffusers":
            raise PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr("importlib.metadata.version", version)
    environment = _environment(["cpu"])
    assert environment["torch"] == "torch 1" and "diffusers" not in environment


def test_a_measured_run_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trains is replaced: it writes what a run does."""

    def trained(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        folder = Path(json.loads(command[-1])["folder"])
        (folder / "run/checkpoints/step-000002").mkdir(parents=True)
        (folder / "run/events.jsonl").touch()
        (folder / "memory.json").write_text('{"bytes": 1, "device": "cpu"}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("unirl.tools.bench.measure.subprocess.run", trained)
    folder = tmp_path / "run-0"
    measure(SUBJECT, folder, steps=1, seed=0, repeat=0, profile=False, allows_code=False)
    assert {path.name for path in (folder / "run").iterdir()} == {"events.jsonl"}


@pytest.mark.slow
def test_two_workloads_are_measured_profiled_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = ["data.prompts_per_step=2", "advantage.constant_reward=skip"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "image", "text", *small, "--to", str(tmp_path / "a"), "--repeats=1", "--steps=2", "--profile"])
    assert ended.value.code == 0, capsys.readouterr().err
    found = load(tmp_path / "a")
    assert [subject.name for subject in found.subjects] == ["image", "text"]
    for subject in found.subjects:
        (one,) = found.of(subject.name)
        assert len(one.steps) == 2 and one.peak_bytes and subject.planned_bytes
        # Its phases are what the run's own events say.
        (folder,) = (tmp_path / "a").glob(f"*-{subject.name}")
        events = [json.loads(line) for line in (folder / "run-0/run/events.jsonl").read_text().splitlines()]
        steps = [event for event in events if event["kind"] == "step"]
        assert not (folder / "run-0/run/checkpoints").exists()
        assert len(steps) == 3 and [dict(step.phases) for step in one.steps] == [step["phases"] for step in steps[1:]]
        assert not [
            event for event in events if event["kind"] in ("evaluated", "checkpoint_saved") and event["step"] < 3
        ]
        # A trace that a viewer opens, whose operations have most of the time of its steps at least.
        with gzip.open(folder / "profile/trace.json.gz", "rt") as file:
            assert {"aten::mm", "aten::addmm"} & {event.get("name") for event in json.load(file)["traceEvents"]}
        (profiled,) = [each for each in found.runs if each.workload == subject.name and each.is_profiled]
        spent = sum(one["seconds"] for one in subject.operations)
        assert 0 < spent <= sum(step.seconds for step in profiled.steps) and len(subject.operations) == 15
    # Without a warm-up the profile begins with the first step.
    with pytest.raises(SystemExit) as ended:
        words = ["--repeats=1", "--steps=1", "--warmup=0", "--profile"]
        main(["bench", "text", *small, "--to", str(tmp_path / "b"), *words])
    assert ended.value.code == 0, capsys.readouterr().err
    (subject,) = load(tmp_path / "b").subjects
    assert len(subject.operations) == 15 and subject.flops.keys() == {"generate", "train"}
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "a")])
    assert ended.value.code == 0 and "1.000 (" in capsys.readouterr().out
