"""`unirl train`: run a recipe, a sweep over one, or go on with a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import CheckpointError
from .config_dump import dump_config, dump_options
from .running import refuse_unless_matched, run_plan

if TYPE_CHECKING:
    from ..run import RunResult
    from .progress import RunSummary

__all__ = ["command"]


@click.command("train")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the run in this folder, or one checkpoint.")
@click.option("--multirun", "-m", is_flag=True, help="Run every combination of `a=1,2`, `range(...)`, `choice(...)`.")
@dump_options
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: Path | None,
    multirun: bool,
    **dump: Any,
) -> None:
    """Train RECIPE with these OVERRIDES, which are Hydra's: `engine=sglang algorithm.clip_range=1e-4`.

    Ctrl-C lets the step finish and saves; `--resume FOLDER` goes on exactly from there, with the recipe and the
    overrides of that run unless others are given.
    """
    from ..catalog import Catalog

    if resume is not None and multirun:
        raise click.UsageError("--resume goes on with one run; --multirun starts several. Give one of them.")
    if multirun and any(dump.values()):
        raise click.UsageError("--cfg, --info, --resolve and --package show one plan; leave out --multirun.")
    if resume is not None:
        recipe, overrides = _recorded(resume, recipe, overrides)
    if recipe is None:
        raise click.UsageError("Name a recipe, such as `unirl train quickstart`; `unirl recipes` lists them.")
    catalog = Catalog.discover()
    if multirun:
        from .sweep import run_sweep

        ctx.exit(run_sweep(recipe, overrides, catalog=catalog))
    if dump_config(recipe, overrides, catalog=catalog, **dump):
        return
    from ..recipe import compose

    plan = compose(recipe, overrides, catalog=catalog)
    refuse_unless_matched(plan, catalog=catalog)
    result, summary = run_plan(plan, overrides=overrides, resume=resume, catalog=catalog)
    _say_how_it_ended(result, summary)
    asked_to_stop = plan.run.stop_at > 0 and result.step >= plan.run.stop_at
    ctx.exit(0 if result.status == "done" or asked_to_stop else 1)


def _recorded(resume: Path, recipe: str | None, overrides: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Recipe and overrides to go on with: those given, else those of the run with further overrides behind them."""
    if recipe is not None and ("=" in recipe or recipe.startswith(("+", "~"))):
        recipe, overrides = None, (recipe, *overrides)
    if recipe is not None:
        return recipe, overrides
    # A checkpoint lies in <run folder>/checkpoints/.
    folder = resume.parent.parent if resume.parent.name == "checkpoints" else resume
    file = folder / "recipe.json"
    if not file.is_file():
        raise CheckpointError(f"--resume {resume}: there is no {file}; give the folder that a run printed.")
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        return recorded["recipe"], (*recorded["overrides"], *overrides)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the recipe of a run ({error}); "
            f"name the recipe: `unirl train RECIPE --resume {resume}`."
        ) from error


def _say_how_it_ended(result: RunResult, summary: RunSummary) -> None:
    lines = summary.lines()
    if result.status == "done":
        lines.append(f"done      {result.step} steps")
    else:
        lines.append(f"stopped   after step {result.step}, saved; go on with `{result.resume_command}`")
    lines.append(f"folder    {result.folder}")
    lines += [f"          {page}" for page in sorted(result.folder.glob("*.html"))]
    sys.stdout.write("\n".join(lines) + "\n")
