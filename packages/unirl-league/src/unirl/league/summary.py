"""The table and the curves of a league, computed from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from .budget import UNITS, Budget

__all__ = ["Curve", "Row", "curve", "interpolated", "summarise"]

Record = Mapping[str, Any]
"""Result of one run: `algorithm`, `seed`, `status`, `error` and, when it is done, `points`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm. Means are over the seeds that finished."""

    algorithm: str
    num_done: int
    num_runs: int
    errors: tuple[str, ...] = ()
    start: float | None = None
    """Score before training."""
    score: float | None = None
    """Score where the budget is spent, on the line between the evaluations before and after."""
    score_std: float | None = None
    """Sample standard deviation over seeds; None for one seed."""
    score_min: float | None = None
    score_max: float | None = None
    mean_score: float | None = None
    """Mean height of the curve of scores over the budget."""
    costs: Mapping[str, float] | None = None
    """Steps, samples, forwards, backwards, CPU and wall seconds at the last evaluation."""
    peak_memory_mib: float | None = None
    distance: float | None = None
    """Distance of the weights from the initial ones, relative to their norm, at the last evaluation."""
    kl: float | None = None
    """KL to the initial policy at the last evaluation; None where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Scores of one algorithm at equal shares of the budget."""

    algorithm: str
    x: tuple[float, ...]
    """Mean over seeds."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def summarise(records: Sequence[Record], *, budget: Budget, score: str) -> list[Row]:
    """A row for each algorithm, the best score first and those without a finite one last."""
    names = dict.fromkeys(record["algorithm"] for record in records)
    rows = [_row(name, [one for one in records if one["algorithm"] == name], budget, score) for name in names]
    return sorted(
        rows, key=lambda row: -math.inf if row.score is None or math.isnan(row.score) else row.score, reverse=True
    )


def curve(records: Sequence[Record], *, algorithm: str, budget: Budget, score: str, x: str, num: int) -> Curve | None:
    """The scores of an algorithm at `num` + 1 equal shares of the budget, over `x`, a field of `Spent` or `kl`.

    Linear between evaluations. None when no run is done, or one has no `x`.
    """
    done = [one["points"] for one in records if one["algorithm"] == algorithm and one["status"] == "done"]
    if not done or any(point[x] is None for points in done for point in points):
        return None
    grid = [budget.amount * index / num for index in range(num + 1)]
    own = UNITS[budget.unit][0]
    heights = [interpolated(grid, _column(points, own), _scores(points, score)) for points in done]
    places = [interpolated(grid, _column(points, own), _column(points, x)) for points in done]
    return Curve(
        algorithm=algorithm,
        x=tuple(map(fmean, zip(*places, strict=True))),
        mean=tuple(map(fmean, zip(*heights, strict=True))),
        low=tuple(map(min, zip(*heights, strict=True))),
        high=tuple(map(max, zip(*heights, strict=True))),
    )


def interpolated(at: Sequence[float], x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Linear interpolation at rising `x`, constant beyond its ends."""
    result: list[float] = []
    for each in at:
        after = next((index for index, value in enumerate(x) if value >= each), len(x) - 1)
        before = max(0, after - 1)
        width = x[after] - x[before]
        share = min(1.0, max(0.0, (each - x[before]) / width)) if width else 1.0
        result.append(y[before] + (y[after] - y[before]) * share)
    return result


def _row(name: str, records: Sequence[Record], budget: Budget, score: str) -> Row:
    done = [one for one in records if one["status"] == "done"]
    errors = tuple(f"seed {one['seed']}: {one['error']}" for one in records if one["status"] != "done")
    if not done:
        return Row(algorithm=name, num_done=0, num_runs=len(records), errors=errors)
    own = UNITS[budget.unit][0]
    ends: list[float] = []
    areas: list[float] = []
    for one in done:
        x, y = _column(one["points"], own), _scores(one["points"], score)
        (end,) = interpolated([budget.amount], x, y)
        ends.append(end)
        inner = [(a, b) for a, b in zip(x, y, strict=True) if a < budget.amount] + [(budget.amount, end)]
        pairs = pairwise(inner)
        areas.append(sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / budget.amount)
    last = [one["points"][-1] for one in done]
    kls = [point["kl"] for point in last if point["kl"] is not None]
    return Row(
        algorithm=name,
        num_done=len(done),
        num_runs=len(records),
        errors=errors,
        start=fmean(_scores(one["points"], score)[0] for one in done),
        score=fmean(ends),
        score_std=_std(ends) if len(ends) > 1 else None,
        score_min=min(ends),
        score_max=max(ends),
        mean_score=fmean(areas),
        costs={
            key: fmean(point[key] for point in last)
            for key in ("steps", "samples", "forwards", "backwards", "cpu_s", "wall_s")
        },
        peak_memory_mib=fmean(one["peak_memory_mib"] for one in done),
        distance=fmean(point["distance"] for point in last),
        kl=fmean(kls) if kls else None,
    )


def _std(values: Sequence[float]) -> float:
    """Like `statistics.stdev`, which rejects NaN: the score of a run that diverged."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _column(points: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(point[key]) for point in points]


def _scores(points: Sequence[Mapping[str, Any]], score: str) -> list[float]:
    return [float(point["metrics"][score]) for point in points]
