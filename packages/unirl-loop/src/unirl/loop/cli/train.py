"""`unirl train`: run a recipe or a sweep over one, or resume a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from unirl.core.cli.config_dump import dump_config, dump_options
from unirl.core.cli.discovery import allow_code_option, discover, plugins_dir_option
from unirl.core.errors import CheckpointError, RecipeError

from .running import refuse_unless_matched, run_plan

if TYPE_CHECKING:
    from ..run import RunResult
    from .progress import RunSummary

__all__ = ["command"]


@click.command("train", short_help="Train a recipe, or resume a run.")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--resume", type=click.Path(path_type=Path), help="Resume the run in this folder, or one checkpoint.")
@click.option("--continue", "continues", is_flag=True, help="Resume the run in run.dir if it has a checkpoint.")
@click.option("--multirun", "-m", is_flag=True, help="Run every combination of `a=1,2`, `range(...)`, `choice(...)`.")
@click.option("--make-env", is_flag=True, help="First create the engine's Python environment if it is missing.")
@plugins_dir_option
@allow_code_option
@dump_options
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: Path | None,
    continues: bool,
    multirun: bool,
    make_env: bool,
    **dump: Any,
) -> None:
    """Train RECIPE with these OVERRIDES, in Hydra's syntax: `engine=sglang algorithm.clip_range=1e-4`.

    Ctrl-C finishes the current step and saves; `--resume FOLDER` continues exactly from there, with the recipe and
    overrides of that run unless others are given. `--continue` starts a run or resumes it: one command for a job that
    is queued again.
    """
    _refuse_ranks()
    one_run = [name for name, given in {"--resume": resume is not None, "--continue": continues}.items() if given]
    if len(one_run) == 2:
        raise click.UsageError("--resume names the run, --continue takes the one in run.dir; use only one of them.")
    if one_run and multirun:
        raise click.UsageError(f"{one_run[0]} continues one run, --multirun starts several; use only one of them.")
    if multirun and make_env:
        raise click.UsageError("--make-env does not work with --multirun; first run `unirl engine-env`.")
    if multirun and any(dump.values()):
        raise click.UsageError("--cfg, --info, --resolve and --package show one plan; remove --multirun.")
    if resume is not None:
        recipe, overrides = _recorded(resume, recipe, overrides)
    if recipe is None:
        raise click.UsageError("Name a recipe, such as `unirl train quickstart`; `unirl recipes` lists them.")
    catalog = discover()
    if multirun:
        from .sweep import run_sweep

        ctx.exit(run_sweep(recipe, overrides, catalog=catalog))
    if dump_config(recipe, overrides, catalog=catalog, **dump):
        return
    from unirl.core.recipe.compose import compose

    plan = compose(recipe, overrides, catalog=catalog)
    refuse_unless_matched(plan, catalog=catalog)
    if make_env:
        from unirl.core.cli.preflight import make_environments

        make_environments(plan, catalog=catalog)
    if continues and not plan.run.dir:
        raise click.UsageError(
            "--continue: name the run's folder, `run.dir=runs/mine`; without it each run gets a new one."
        )
    result, summary = run_plan(plan, overrides=overrides, resume=resume, continues=continues, catalog=catalog)
    _say_how_it_ended(result, summary)
    asked_to_stop = plan.run.stop_at > 0 and result.step >= plan.run.stop_at
    ctx.exit(0 if result.status == "done" or asked_to_stop else 1)


def _refuse_ranks() -> None:
    """Refuse to start under torchrun, where every process would start a whole run."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and ranks != "1":
        raise RecipeError(
            f"WORLD_SIZE={ranks}: this is one of {ranks} torchrun processes, and each would start a whole run. "
            "Start `unirl train` once, with `launcher=ray launcher.train_ranks=N`: it starts the ranks itself. If "
            "you are not using torchrun, unset RANK and WORLD_SIZE."
        )


def _recorded(resume: Path, recipe: str | None, overrides: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Recipe and overrides to resume with: those given, else those of the run followed by further overrides."""
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
        # `run.stop_at` has been reached; the resumed run must not stop there again.
        kept = [override for override in recorded["overrides"] if not override.startswith("run.stop_at=")]
        _check_working_folder(recorded, overrides)
        return recorded["recipe"], (*kept, *overrides)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the recipe of a run ({error}); "
            f"name the recipe: `unirl train RECIPE --resume {resume}`."
        ) from error


def _check_working_folder(recorded: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise CheckpointError for a relative path of a run that was started in another folder and is not in this one.

    The folder is not changed to that one: code in the current folder runs without a question.
    """
    from unirl.core.specs.leaves import leaves

    then, values = Path(recorded.get("started_in", "")), leaves(recorded.get("resolved", {}))
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    read = {key: str(values.get(key, "")) for key in recorded.get("files", ())}
    places = {key: str(value) for key, value in values.items() if key.endswith(".path")}
    if recorded["recipe"].endswith(".yaml"):
        places["recipe"] = recorded["recipe"]
    for key, value in {**read, **places}.items():
        # A function is named by its file and its name.
        path = Path(value.partition(":")[0]).expanduser()
        is_lost = (then / path).exists() or (key in read and not then.exists())
        if value and key not in given and not path.is_absolute() and not path.exists() and is_lost:
            raise CheckpointError(
                f"{key}: {value!r} is not in {Path.cwd()}. This run was started in {then}, where relative paths of its "
                f"recipe begin. Resume it from there: `cd {then}`."
            )


def _say_how_it_ended(result: RunResult, summary: RunSummary) -> None:
    lines = summary.lines()
    if result.status == "done":
        lines.append(f"done      {result.step} steps")
    else:
        lines.append(f"stopped   after step {result.step}, saved; resume with `{result.resume_command}`")
    lines.append(f"folder    {result.folder}")
    lines += [f"          {page}" for page in sorted(result.folder.glob("*.html"))]
    sys.stdout.write("\n".join(lines) + "\n")
