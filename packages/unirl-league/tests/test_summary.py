"""The table, the curves and the pages, from records whose numbers are known."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unirl.core.errors import RecipeError
from unirl.league.budget import UNITS, Budget, Spent, parse_budget
from unirl.league.page import COLUMNS, cells, write
from unirl.league.summary import curve, interpolated, summarise
from unirl.league.tune import best, changed, grid_points, point_name

SCORE = "reward/shapes"
BUDGET = Budget(amount=100, unit="samples")
ROUNDING = 1e-12
"""Sums of a few fp64 numbers of about 1, in another order than NumPy's."""


def record(algorithm: str, seed: int, samples: list[float], scores: list[float], kl: float = 0.002) -> dict[str, Any]:
    points = [
        {
            "steps": index,
            "samples": at,
            "forwards": 10 * at,
            "backwards": 4 * at,
            "cpu_s": at / 8,
            "wall_s": at / 4,
            "metrics": {SCORE: score},
            "distance": 0.01 * index,
            "kl": kl * at,
        }
        for index, (at, score) in enumerate(zip(samples, scores, strict=True))
    ]
    result = {"algorithm": algorithm, "seed": seed, "status": "done", "error": "", "points": points}
    return {**result, "peak_memory_mib": 500.0 + seed}


X = ([0, 36, 72, 108], [0, 48, 96, 120])
Y = ([0.5, 0.6, 0.65, 0.9], [0.5, 0.55, 0.7, 0.4])
RECORDS = [
    record("a", 0, X[0], Y[0], kl=0.001),
    record("a", 1, X[1], Y[1], kl=0.003),
    record("b", 0, [0, 100], [0.5, 0.95]),
    {"algorithm": "b", "seed": 1, "status": "failed", "error": "no <memory>"},
    {"algorithm": "c", "seed": 0, "status": "failed", "error": "killed"},
]


def test_the_table_is_what_numpy_says_of_the_records() -> None:
    by_name = {row.algorithm: row for row in summarise(RECORDS, budget=BUDGET, score=SCORE)}
    ends = [np.interp(100, x, y) for x, y in zip(X, Y, strict=True)]
    fine = np.linspace(0, 100, 100_001)
    areas = [np.trapezoid(np.interp(fine, x, y), fine) / 100 for x, y in zip(X, Y, strict=True)]
    row = by_name["a"]
    assert row.score == pytest.approx(np.mean(ends), abs=ROUNDING)
    assert row.score_std == pytest.approx(np.std(ends, ddof=1), abs=ROUNDING)
    assert (row.score_min, row.score_max) == pytest.approx((min(ends), max(ends)), abs=ROUNDING)
    # Every kink lies on the fine grid, so the trapezoids of both are exact.
    assert row.mean_score == pytest.approx(np.mean(areas), abs=1e-9)
    assert row.costs is not None and row.costs["samples"] == 114 and row.costs["forwards"] == 1140
    assert (row.start, row.peak_memory_mib, row.distance) == (0.5, 500.5, pytest.approx(0.03))
    assert row.kl == pytest.approx((0.001 * 108 + 0.003 * 120) / 2)


def test_the_best_score_stands_first_and_failures_last_with_their_reasons() -> None:
    rows = summarise(RECORDS, budget=BUDGET, score=SCORE)
    assert [(row.algorithm, row.num_done, row.num_runs) for row in rows] == [("b", 1, 2), ("a", 2, 2), ("c", 0, 1)]
    assert rows[0].errors == ("seed 1: no <memory>",) and rows[0].score_std is None
    assert cells(rows[2])[:2] == ["c", "failed"]
    assert {len(cells(row)) for row in rows} == {len(COLUMNS)}


def test_interpolation_is_that_of_numpy() -> None:
    at = [-5.0, 0.0, 10.0, 36.0, 99.0, 500.0]
    assert interpolated(at, X[0], Y[0]) == pytest.approx(list(np.interp(at, X[0], Y[0])), abs=ROUNDING)


@pytest.mark.parametrize("axis", ["samples", "forwards", "cpu_s"])
def test_a_curve_has_the_mean_and_the_range_of_the_seeds_at_equal_shares_of_the_budget(axis: str) -> None:
    grid = np.linspace(0, 100, 5)
    heights = np.array([np.interp(grid, x, y) for x, y in zip(X, Y, strict=True)])
    result = curve(RECORDS, algorithm="a", budget=BUDGET, score=SCORE, x=axis, num=4)
    assert result is not None
    assert result.x == pytest.approx(list(grid * {"samples": 1, "forwards": 10, "cpu_s": 1 / 8}[axis]), abs=1e-9)
    assert result.mean == pytest.approx(list(heights.mean(axis=0)), abs=ROUNDING)
    assert result.low == pytest.approx(list(heights.min(axis=0)), abs=ROUNDING)
    assert result.high == pytest.approx(list(heights.max(axis=0)), abs=ROUNDING)
    without = [{**point, axis: None} for point in RECORDS[0]["points"]]
    records = [{**RECORDS[0], "points": without}]
    assert axis == "samples" or curve(records, algorithm="a", budget=BUDGET, score=SCORE, x=axis, num=4) is None
    assert curve(RECORDS, algorithm="c", budget=BUDGET, score=SCORE, x=axis, num=4) is None


def test_the_files_have_the_table_the_failures_and_the_refusals(tmp_path: Path) -> None:
    rows = write(
        tmp_path,
        head={"recipe": "quickstart", "seeds": [0, 1]},
        records=RECORDS,
        refused={"grpo": "trains text"},
        budget=BUDGET,
        score=SCORE,
        intervals=4,
    )
    content = json.loads((tmp_path / "league.json").read_text())
    assert [row["algorithm"] for row in content["table"]] == ["b", "a", "c"] and content["runs"] == RECORDS
    text, html = (tmp_path / "LEAGUE.md").read_text(), (tmp_path / "league.html").read_text()
    for row in rows:
        assert f"| {' | '.join(cells(row))} |" in text
    assert "- `c`: seed 0: killed" in text and "- `grpo`: trains text" in text
    assert "no &lt;memory&gt;" in html and "<b>grpo</b>: trains text" in html
    # Nothing is loaded from elsewhere.
    assert "<script" not in html and "<link" not in html and "src=" not in html
    figures = html.split("<svg")[1:]
    assert len(figures) == 5
    for figure in figures:
        ET.fromstring("<svg" + figure.split("</svg>")[0] + "</svg>")


def test_numbers_of_a_diverged_run_are_null_in_the_file(tmp_path: Path) -> None:
    diverged = record("a", 0, [0, 100], [0.5, math.nan], kl=math.inf)
    write(tmp_path, head={}, records=[diverged], refused={}, budget=BUDGET, score=SCORE, intervals=1)
    content = json.loads((tmp_path / "league.json").read_text(), parse_constant=pytest.fail)
    (row,), (run,) = content["table"], content["runs"]
    assert (row["start"], row["score"], row["kl"]) == (0.5, None, None)
    assert run["points"][-1]["metrics"] == {SCORE: None}


@pytest.mark.parametrize(
    ("text", "amount", "field"),
    [
        ("120s", 120, "cpu_s"),
        ("1.5s", 1.5, "cpu_s"),
        ("300wall", 300, "wall_s"),
        ("40steps", 40, "steps"),
        ("2000samples", 2000, "samples"),
        ("20000forwards", 20000, "forwards"),
    ],
)
def test_a_budget_counts_its_own_unit_alone(text: str, amount: float, field: str) -> None:
    budget = parse_budget(text)
    assert (budget.amount, budget.field) == (amount, field)
    every = {name: 10.0**9 for name, _ in UNITS.values() if name != field}
    assert budget.of(Spent(**every, **{field: amount / 4})) == 0.25  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "120", "s", "0s", "-3steps", "10 minutes", "1e3s", "5stepss"])
def test_a_budget_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--budget: got .* expected a number above 0"):
        parse_budget(text)


def test_the_best_point_of_a_grid_is_the_highest_without_a_failed_run() -> None:
    failed = {"algorithm": "a", "seed": 1, "status": "failed", "error": "out of memory"}
    given = {("lr=1",): [0.9, None], ("lr=2",): [0.2, 0.4], ("lr=3",): [0.7, 0.1], ("lr=4",): [math.nan, 0.9]}
    records = {
        point: [failed if end is None else record("a", 0, [0, 100], [0.5, end]) for end in ends]
        for point, ends in given.items()
    }
    choice = best("a", records, budget=BUDGET, score=SCORE)
    assert choice.point == ("lr=3",)
    assert choice.scores == {"lr=1": None, "lr=2": pytest.approx(0.3), "lr=3": pytest.approx(0.4), "lr=4": None}
    with pytest.raises(RecipeError, match="no score is finite"):
        best("a", {("lr=4",): records["lr=4",]}, budget=BUDGET, score=SCORE)
    with pytest.raises(RecipeError, match="--tune: a: no value of the grid can be used: out of memory"):
        best("a", {("lr=1",): [failed]}, budget=BUDGET, score=SCORE)


def test_a_grid_has_every_combination_and_replaces_the_values_of_the_settings() -> None:
    assert grid_points([]) == []
    points = grid_points(["backend.lr=1,2", "train.updates_per_step=1,4"])
    assert len(points) == 4 and points[1] == ("backend.lr=1", "train.updates_per_step=4")
    assert point_name(points[1]) == "backend.lr=1,train.updates_per_step=4"
    assert changed(["+backend.lr=7", "run.threads=1"], points[1]) == ["run.threads=1", *points[1]]
    with pytest.raises(RecipeError, match=r"--tune: got 'backend\.lr' twice"):
        grid_points(["backend.lr=1,2", "backend.lr=3,4"])
