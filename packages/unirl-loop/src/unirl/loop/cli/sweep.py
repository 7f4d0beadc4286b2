"""`unirl train --multirun`: every combination of a sweep, one after the other, and a table of the results."""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.cli.output import print_table
from unirl.core.disk import replace_text
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.strict_json import strict_json

from ..run_folder import new_folder
from .running import refuse_unless_matched, run_plan

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog

__all__ = ["Job", "run_sweep"]

SWEEP_DIR = "hydra.sweep.dir"


@dataclass(kw_only=True)
class Job:
    """One combination of a sweep and its result."""

    number: int
    overrides: list[str]
    folder: str
    status: str = "not run"
    """`done`, `stopped`, `refused`, `failed` or `not run`."""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    error: str = ""


def run_sweep(recipe: str, overrides: Sequence[str], *, catalog: Catalog) -> int:
    """Run a sweep; returns the exit code, 1 when a job was refused, failed or was stopped.

    Each job has its own folder `multirun/<time>/<number>`; `hydra.sweep.dir=` sets another parent. `results.json` there
    lists the result of each job, and is rewritten after every job.
    """
    from unirl.core.recipe.compose import split_sweep

    root, overrides = _sweep_folder(overrides)
    jobs = [
        Job(number=number, overrides=job, folder=str(root / str(number)))
        for number, job in enumerate(split_sweep(recipe, overrides, catalog=catalog))
    ]
    varied = _varied(jobs)
    for job in jobs:
        sys.stdout.write(f"job {job.number + 1}/{len(jobs)}  {_shown(job, varied)}\n")
        _run(job, recipe, catalog=catalog)
        if job.error:
            sys.stdout.write(f"{job.status}: {job.error}\n")
        root.mkdir(parents=True, exist_ok=True)
        results = {"recipe": recipe, "jobs": [asdict(job) for job in jobs]}
        replace_text(root / "results.json", strict_json(results, indent=1))
        if job.status == "stopped":
            break
    rows = [
        {
            "job": job.number,
            "overrides": _shown(job, varied),
            "status": job.status,
            "step": job.step,
            **{key: f"{value:.4f}" for key, value in job.metrics.items()},
        }
        for job in jobs
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print_table(rows, columns=columns)
    sys.stdout.write(f"folder  {root}\n")
    return 0 if all(job.status == "done" for job in jobs) else 1


def _run(job: Job, recipe: str, *, catalog: Catalog) -> None:
    """Run one job; whatever it raises is recorded on it, so that the others still run."""
    from unirl.core.recipe.compose import compose

    overrides = [*job.overrides, f"run.dir={json.dumps(job.folder)}"]
    try:
        plan = compose(recipe, overrides, catalog=catalog)
        refuse_unless_matched(plan, catalog=catalog)
    except UniRLError as error:
        job.status, job.error = "refused", str(error)
        return
    try:
        result, summary = run_plan(plan, overrides=overrides, resume=None, catalog=catalog)
    except UniRLError as error:
        job.status, job.error = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - recorded on the job, with its traceback in the job's folder
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        job.status, job.error = "failed", f"{type(error).__name__}: {error} (see {folder / 'error.txt'})"
    else:
        asked_to_stop = plan.run.stop_at > 0 and result.step >= plan.run.stop_at
        job.status, job.step = "done" if asked_to_stop else result.status, result.step
        job.metrics = {key: value for key, value in summary.metrics.items() if key.endswith("reward_mean")}
        job.metrics |= {f"eval {key}": value for key, value in summary.evaluated.items()}


def _sweep_folder(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The parent folder of a sweep's jobs, and the overrides without the one that sets it."""
    if any(override.startswith("run.dir=") for override in overrides):
        raise RecipeError(f"run.dir: each job of a sweep has its own folder; use `{SWEEP_DIR}=` to set their parent.")
    kept = [override for override in overrides if not override.startswith(f"{SWEEP_DIR}=")]
    named = [override.partition("=")[2] for override in overrides if override not in kept]
    if named:
        root = Path(named[-1])
        if root.exists() and any(root.iterdir()):
            raise RecipeError(f"{SWEEP_DIR}: {root} is not empty; name another folder.")
        return root, kept
    return new_folder(Path("multirun"), f"{datetime.now():%Y%m%d-%H%M%S}"), kept


def _varied(jobs: Sequence[Job]) -> set[str]:
    """Overrides that not every job has."""
    used = Counter(override for job in jobs for override in job.overrides)
    return {override for override, count in used.items() if count < len(jobs)}


def _shown(job: Job, varied: set[str]) -> str:
    return " ".join(override for override in job.overrides if override in varied) or "as it is"
