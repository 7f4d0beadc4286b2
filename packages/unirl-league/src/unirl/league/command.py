"""`unirl league`: every algorithm on one recipe, on equal terms."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from unirl.core.cli.discovery import allow_code_option

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["command"]


@click.command("league", short_help="Run every algorithm on one recipe, with equal budgets.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--algorithms", default="all", show_default=True, help="Names with commas, or all that fit.")
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each, `run.seed` 0, 1, ..."
)
@click.option("--first-seed", type=click.IntRange(0), help="Seed of the first run: 0, or 1000 with --tune.")
@click.option("--budget", required=True, help="Of each run: 120s (CPU), 300wall, 40steps, 2000samples, 20000forwards.")
@click.option("--evals", default=5, show_default=True, type=click.IntRange(1), help="Evaluations besides the first.")
@click.option("--with", "own", multiple=True, help='Overrides of one algorithm: "draft: algorithm.gradient_steps=3".')
@click.option("--settings", type=click.Path(path_type=Path), help="File with the overrides of each algorithm.")
@click.option("--tune", multiple=True, help="Choose each algorithm's value of a setting: backend.lr=3e-5,1e-4.")
@click.option("--score", default="", help="Metric of evaluations to compare; by default the recipe's first reward.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of the league; a league already there is continued.",
)
@click.option("--retry", is_flag=True, help="Run failed runs again.")
@click.option("--dry-run", is_flag=True, help="Show who takes part and what runs, and run nothing.")
@allow_code_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    algorithms: str,
    seeds: int,
    first_seed: int | None,
    budget: str,
    evals: int,
    own: tuple[str, ...],
    settings: Path | None,
    tune: tuple[str, ...],
    score: str,
    folder: Path | None,
    retry: bool,
    dry_run: bool,
) -> None:
    """Run every algorithm with every seed on RECIPE with the same budget, one after the other, and compare them.

    OVERRIDES apply to every run. Each run is a separate process. Given the same command again, finished runs are kept.
    Writes league.json, LEAGUE.md and league.html; exits with 1 if a run failed.

    With --tune, runs each algorithm with each value instead, on seeds apart from those of a league, and writes the best
    ones to settings.yaml, which --settings reads.
    """
    from unirl.core.cli.discovery import discover
    from unirl.core.disk import replace_text
    from unirl.core.errors import RecipeError

    from .budget import parse_budget
    from .league import check_seeds, chosen, read_settings, run_all, score_key
    from .page import COLUMNS, cells, write
    from .process import preload
    from .run import Job
    from .tune import FIRST_SEED, best, changed, grid_points, point_name, settings_text

    catalog, bound, points = discover(), parse_budget(budget), grid_points(tune)
    file = read_settings(recipe, settings)
    first = first_seed if first_seed is not None else FIRST_SEED if points else 0
    numbers = range(first, first + seeds)
    if not points:
        check_seeds(numbers, file)
    extra = _own(own)
    overrides = (*file.overrides, *overrides)

    def of(name: str) -> list[str]:
        return [*overrides, *extra.get(name, file.algorithms.get(name, ()))]

    entries = chosen(recipe, algorithms, of, catalog=catalog)
    if absent := sorted(set(extra) - set(entries.algorithms) - set(entries.refused)):
        raise RecipeError(f"--with: {absent[0]!r} is not in the league; name it in --algorithms.")
    for name, why in entries.refused.items():
        sys.stdout.write(f"not in the league  {name}: {why}\n")
    if not entries.algorithms:
        raise RecipeError(f"{recipe}: no algorithm is left; see the reasons above.")
    metric = score or score_key(recipe, overrides, file, catalog=catalog)
    where = folder or Path("leagues") / (re.sub(r"\W+", "-", Path(recipe).stem) + ("-tuning" if points else ""))

    def jobs_at(point: tuple[str, ...] = ()) -> list[Job]:
        return [
            Job(
                recipe=recipe,
                algorithm=name,
                seed=seed,
                overrides=tuple(changed(of(name), point)),
                budget=bound,
                intervals=evals,
                score=metric,
            )
            for seed in numbers
            for name in entries.algorithms
        ]

    for point in points:
        at_point = {name: changed(of(name), point) for name in entries.algorithms}
        fitting = chosen(recipe, ",".join(at_point), at_point.__getitem__, catalog=catalog)
        for name, why in fitting.refused.items():
            raise RecipeError(f"--tune: {point_name(point)} does not fit {name}: {why}")
    if dry_run:
        for job in [job for point in points or [()] for job in jobs_at(point)]:
            sys.stdout.write(f"{job.algorithm}, seed {job.seed}: {' '.join(job.overrides) or 'as the recipe is'}\n")
        return
    preload(entries.modules)
    head = {
        "budget": f"{bound} for each run",
        "seeds": list(numbers),
        "overrides of all": list(overrides),
    }
    if points:
        found = {point: run_all(jobs_at(point), where / point_name(point), again=retry, said=_say) for point in points}
        choices = {name: best(name, found, budget=bound, score=metric) for name in entries.algorithms}
        text = settings_text(
            file.recipe,
            score=metric,
            common=overrides,
            tuned={"grid": list(map(point_name, points)), "budget": head["budget"], "seeds": head["seeds"]},
            choices=choices,
            overrides={name: of(name)[len(overrides) :] for name in choices},
        )
        replace_text(where / "settings.yaml", text)
        for name, choice in choices.items():
            others = ", ".join(f"{each} {value}" for each, value in choice.scores.items())
            _say(f"{name}: {' '.join(choice.point)} of {others}")
        _say(f"settings  {where / 'settings.yaml'}")
        return
    records = run_all(jobs_at(), where, again=retry, said=_say)
    head = {
        "recipe": recipe,
        "score": metric,
        **head,
        "overrides of one": {name: of(name)[len(overrides) :] for name in entries.algorithms},
    }
    if file.tuned:
        head["tuned"] = {key: value for key, value in file.tuned.items() if key != "scores"}
    rows = write(
        where, head=head, records=records, refused=entries.refused, budget=bound, score=metric, intervals=evals
    )
    _table([list(COLUMNS[:7]), *(cells(row)[:7] for row in rows)])
    sys.stdout.write(f"page    {where / 'league.html'}\n")
    ctx.exit(0 if all(record["status"] == "done" for record in records) else 1)


def _own(given: Sequence[str]) -> dict[str, list[str]]:
    """Algorithm -> its overrides. Raises RecipeError for text without a colon."""
    from unirl.core.errors import RecipeError

    result: dict[str, list[str]] = {}
    for text in given:
        name, colon, values = text.partition(":")
        if not colon or not values.split():
            raise RecipeError(f'--with: got {text!r}, expected "ALGORITHM: key=value ...".')
        result.setdefault(name.strip(), []).extend(values.split())
    return result


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
