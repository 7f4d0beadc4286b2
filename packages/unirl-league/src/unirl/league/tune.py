"""Tuning the settings of each algorithm over a grid, on separate seeds, and the file that records it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from unirl.core.errors import RecipeError

from .budget import Budget
from .summary import Record, summarise

__all__ = ["FIRST_SEED", "Choice", "best", "changed", "grid_points", "point_name", "settings_text"]

FIRST_SEED = 1000
"""First seed of tuning, so that nothing is chosen on a league's seeds 0, 1, ..."""

Point = tuple[str, ...]
"""Overrides of one point of the grid, such as `("backend.lr=1e-4",)`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result of tuning for one algorithm."""

    point: Point
    scores: Mapping[str, float | None]
    """Name of each point -> its score where the budget is spent, mean over seeds; None for a failed run or a score that
    is not finite."""


def grid_points(texts: Sequence[str]) -> list[Point]:
    """Every combination of values; none without texts. texts: `key=value,value,...`, at least two values each.

    Raises RecipeError for other texts, and for a key that is there twice.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key, given = key.strip(), [value.strip() for value in values.split(",")]
        if not key or not all(given) or len(set(given)) < max(2, len(given)):
            raise RecipeError(f"--tune: got {text!r}, expected a key and two or more values: backend.lr=3e-5,1e-4.")
        if key in axes:
            raise RecipeError(f"--tune: got {key!r} twice; give all its values at once.")
        axes[key] = given
    if not axes:
        return []
    return list(itertools.product(*([f"{key}={value}" for value in values] for key, values in axes.items())))


def point_name(point: Point) -> str:
    """Name of a point in the settings file, and of the folder with its runs."""
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(point))


def changed(overrides: Sequence[str], point: Point) -> list[str]:
    """The overrides with the values of the point in place of theirs."""
    tuned = {_key(text) for text in point}
    return [text for text in overrides if _key(text) not in tuned] + [*point]


def best(name: str, records: Mapping[Point, Sequence[Record]], *, budget: Budget, score: str) -> Choice:
    """The point with the highest score, the first of equal ones; a point with a failed run is out.

    records: of every algorithm, at each point. Raises RecipeError when no point is left.
    """
    scores: dict[Point, float | None] = {}
    for point, given in records.items():
        own = [record for record in given if record["algorithm"] == name]
        (row,) = summarise(own, budget=budget, score=score)
        is_known = row.num_done == row.num_runs and row.score is not None and math.isfinite(row.score)
        scores[point] = row.score if is_known else None
    finite = {point: value for point, value in scores.items() if value is not None}
    if not finite:
        errors = [str(record["error"]) for given in records.values() for record in given if record["algorithm"] == name]
        why = next(filter(None, errors), "no score is finite")
        raise RecipeError(f"--tune: {name}: no value of the grid can be used: {why}. Give others, or leave it out.")
    point = max(finite, key=lambda one: finite[one])
    return Choice(point=point, scores={point_name(one): value for one, value in scores.items()})


def settings_text(
    recipe: str,
    *,
    score: str,
    common: Sequence[str],
    tuned: Mapping[str, Any],
    choices: Mapping[str, Choice],
    overrides: Mapping[str, Sequence[str]],
) -> str:
    """A settings file of one recipe: the choice of each algorithm beside its other overrides, and how it was made.

    common: overrides of all, which the choice holds for.
    tuned: the grid and the budget, for people, and `seeds`, which the league then refuses to report.
    """
    content = {
        "score": score,
        "overrides": [*common],
        "tuned": {**tuned, "scores": {name: dict(choice.scores) for name, choice in choices.items()}},
        "algorithms": {name: changed(overrides[name], choice.point) for name, choice in choices.items()},
    }
    head = "# The settings of each algorithm with the best final score, chosen by `unirl league --tune`.\n"
    return head + yaml.safe_dump({recipe: content}, sort_keys=False, width=120)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
