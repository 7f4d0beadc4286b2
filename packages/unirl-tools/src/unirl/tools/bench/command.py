"""`unirl bench`: seconds, memory and traffic of the steps of a recipe, and the comparison of two measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from unirl.core.cli.discovery import allow_code_option, plugins_dir_option

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog

    from .results import Results, Subject

__all__ = ["command"]

OWN = ("run.seed", "run.max_steps", "run.dir")
"""Settings that each run has its own of."""


@click.command("bench", short_help="Measure the steps of a recipe, and compare two measurements.")
@click.argument("words", nargs=-1, metavar="[WORKLOAD]... [KEY=VALUE]...")
@click.option("--to", type=click.Path(path_type=Path), help="Folder to write; it must not exist.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each workload.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps of a run that count.")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Steps before them.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="run.seed of the first run; the next has the next.",
)
@click.option(
    "--profile", is_flag=True, help="One more run of each, with a trace and the operations that took longest."
)
@click.option("--compare", "is_comparison", is_flag=True, help="Compare two results: --compare BEFORE AFTER.")
@plugins_dir_option
@allow_code_option
def command(
    words: tuple[str, ...],
    to: Path | None,
    repeats: int,
    steps: int,
    warmup: int,
    seed: int,
    profile: bool,
    is_comparison: bool,
) -> None:
    """Measure WORKLOADs: image, text, video and edit are miniatures that run anywhere, and every recipe is one by its
    name. With none, all four. KEY=VALUE are overrides of all of them.

    Each run is a separate process, without evaluation, checkpoints and trackers. Workloads take turns, so that a
    machine that is busy for a while is busy for all of them.
    """
    from unirl.core.cli.discovery import discover

    from .report import compare, comparison, page, report
    from .results import load, save

    if is_comparison:
        if len(words) != 2 or to is not None:
            raise click.UsageError("--compare takes two folders that `unirl bench --to` wrote, and nothing else.")
        before, after = (load(Path(word)) for word in words)
        click.echo(comparison(before, after, compare(before, after)), nl=False)
        return
    if to is None:
        raise click.UsageError("--to: give a new folder for the results.")
    if to.exists():
        raise click.UsageError(f"--to: {to} exists already; give a new folder, or remove it.")
    catalog = discover()
    subjects = _subjects(words, catalog, warmup=warmup)
    to.mkdir(parents=True)
    results = _measured(subjects, to, catalog=catalog, repeats=repeats, steps=steps, seed=seed, profile=profile)
    save(results, to)
    text = report(results)
    (to / "report.md").write_text(text, encoding="utf-8")
    (to / "report.html").write_text(page(text), encoding="utf-8")
    click.echo(text, nl=False)
    click.echo(f"\nfolder  {to}")


def _subjects(words: Sequence[str], catalog: Catalog, *, warmup: int) -> list[Subject]:
    """The workloads, checked: each composes, and its parts fit."""
    from unirl.core.errors import PlanRejected
    from unirl.core.match.match import match
    from unirl.core.recipe.compose import compose

    from ..plan.memory_plan import memory_plan
    from .measure import NO_EXTRAS, WORKLOADS
    from .results import Subject

    overrides = tuple(word for word in words if "=" in word or word.startswith("~"))
    for word in overrides:
        if word.lstrip("+").split("=")[0] in OWN:
            raise click.UsageError(f"{word}: `unirl bench` sets it itself, see --steps, --seed and --to.")
    result: list[Subject] = []
    for name in dict.fromkeys([word for word in words if word not in overrides] or WORKLOADS):
        recipe = WORKLOADS.get(name, name)
        trackers = compose(recipe, overrides, catalog=catalog).trackers.values()
        untracked = (f"~tracker@{choice.key}" if "." in choice.key else f"~{choice.key}" for choice in trackers)
        chosen = (*overrides, *NO_EXTRAS, *untracked)
        # The same for every seed and number of steps.
        plan = compose(recipe, [*chosen, "run.seed=0", "run.max_steps=1"], catalog=catalog)
        verdict = match(plan, catalog=catalog)
        if not verdict.accepted:
            raise PlanRejected("\n".join(map(str, verdict.reasons)))
        prediction = memory_plan(plan, catalog=catalog)
        (process, *others) = prediction.processes
        subject = Subject(
            name=name,
            recipe=recipe,
            overrides=chosen,
            plan_hash=plan.hash,
            warmup=warmup,
            planned_bytes=None if others else process.total,
            flops=prediction.phase_flops,
            peak_tflops=plan.run.peak_tflops,
        )
        result.append(subject)
    return result


def _measured(
    subjects: Sequence[Subject], to: Path, *, catalog: Catalog, repeats: int, steps: int, seed: int, profile: bool
) -> Results:
    from unirl.loop.costs import peak_tflops_of

    from .measure import OPERATIONS, measure
    from .results import Results, Run

    runs: list[Run] = []
    folders = [to / f"{place}-{subject.name.replace('/', '-')}" for place, subject in enumerate(subjects)]
    for repeat in range(repeats + profile):
        is_profiled = repeat == repeats
        label = "profile" if is_profiled else f"run-{repeat}"
        facts: dict[str, Any] = {"seed": seed + repeat, "repeat": repeat, "profile": is_profiled}
        for subject, folder in zip(subjects, folders, strict=True):
            click.echo(f"{subject.name}: {label}, {repeats} runs", err=True)
            runs.append(measure(subject, folder / label, steps=steps, allows_code=catalog.allows_code, **facts))
    complete: list[Subject] = []
    for subject, folder in zip(subjects, folders, strict=True):
        (device, *_) = [run.device for run in runs if run.workload == subject.name]
        file = folder / "profile" / OPERATIONS
        rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ()
        peak = subject.peak_tflops or peak_tflops_of(device)
        complete.append(dataclasses.replace(subject, peak_tflops=peak, operations=tuple(rows)))
    environment = _environment([run.device for run in runs])
    return Results(environment=environment, subjects=tuple(complete), runs=tuple(runs))


def _environment(devices: Sequence[str]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from unirl.numerics.cpu import describe_cpu

    versions: dict[str, str] = {}
    for name in ("torch", "diffusers", "transformers", "unirl-core"):
        # Which of them a workload needs depends on its plugins.
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "device": ", ".join(dict.fromkeys(devices)),
        "cpu": str(describe_cpu(with_torch=False)),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": _commit(),
        **versions,
    }


def _commit() -> str:
    """Of the checkout that UniRL runs from; "" for installed wheels, wherever they lie."""
    folder = Path(__file__).parent
    commands = (["git", "ls-files", "--error-unmatch", Path(__file__).name], ["git", "describe", "--always", "--dirty"])
    try:
        *_, last = [subprocess.run(one, cwd=folder, capture_output=True, text=True, check=True) for one in commands]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return last.stdout.strip()
