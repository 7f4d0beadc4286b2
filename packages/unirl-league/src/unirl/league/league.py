"""A league: which algorithms run, their settings, and the records of its runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from unirl.core.disk import replace_text
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.match.match import match
from unirl.core.names import did_you_mean
from unirl.core.recipe.compose import compose
from unirl.core.recipe.files import find_recipe, recipe_roots

from .process import run_process
from .run import Job, refuse

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.plan import Plan

__all__ = ["Entries", "Settings", "check_seeds", "chosen", "read_settings", "run_all", "score_key"]

RESULT = "result.json"
JOB = "job.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one recipe from a settings file."""

    recipe: str
    """Its name, whatever path the command gives."""
    score: str = ""
    """Metric of the evaluations that is compared, such as `reward/shapes`."""
    overrides: tuple[str, ...] = ()
    """Overrides for all algorithms, applied before those of the command."""
    tuned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How the overrides were chosen; its `seeds` may not be reported."""
    algorithms: Mapping[str, tuple[str, ...]]
    """Algorithm -> its overrides."""


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Algorithms that take part, and those that are refused."""

    algorithms: tuple[str, ...]
    refused: Mapping[str, str]
    """Algorithm -> why it does not fit the recipe."""
    modules: tuple[str, ...]
    """Modules of all parts of the runs, to import before them."""


def read_settings(recipe: str, file: Path | None) -> Settings:
    """Settings of a recipe from a file, or else from the `league.yaml` of the package that ships the recipe.

    Raises RecipeError for a file that is not one.
    """
    found = find_recipe(recipe, recipe_roots())
    path = file or found.root.folder.parent / "league.yaml"
    if file is None and not path.is_file():
        return Settings(recipe=found.name, algorithms={})
    try:
        given = cast("dict[str, Any]", yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        own = given.get(found.name, {})
        algorithms = {name: tuple(map(str, [*overrides])) for name, overrides in own.get("algorithms", {}).items()}
        unknown = set(own) - {"score", "overrides", "tuned", "algorithms"}
        common = tuple(map(str, [*own.get("overrides", [])]))
        tuned = dict(own.get("tuned", {}))
        if tuned:
            tuned["seeds"] = [int(seed) for seed in tuned["seeds"]]
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read as settings of a league: {' '.join(str(error).split())}.") from error
    if unknown:
        raise RecipeError(
            f"{path}: {found.name}: got {sorted(unknown)[0]!r}, expected `score`, `tuned` and `algorithms`."
        )
    return Settings(
        recipe=found.name, score=str(own.get("score", "")), overrides=common, tuned=tuned, algorithms=algorithms
    )


def check_seeds(seeds: Iterable[int], settings: Settings) -> None:
    """Raises RecipeError for a seed that chose the settings: its score is better than that of new seeds."""
    if both := sorted(set(seeds) & set(settings.tuned.get("seeds", ()))):
        raise RecipeError(
            f"--first-seed: seed {both[0]} chose the settings of the algorithms; expected other seeds than "
            f"{settings.tuned['seeds']}. Begin with another one, or tune on others."
        )


def chosen(recipe: str, names: str, overrides: Callable[[str], Sequence[str]], *, catalog: Catalog) -> Entries:
    """The algorithms of a league. names: separated by commas, or `all` that are installed.

    Raises RecipeError for an unknown name. Those that do not fit the recipe are refused, in the words of the match.
    """
    known = sorted(catalog.names("algorithm"))
    asked = known if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise RecipeError(f"--algorithms: {name!r} is not installed{hint} There are: {', '.join(known)}.")
    fitting: list[str] = []
    modules: list[str] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(asked):
        try:
            plan = compose(recipe, [f"algorithm={name}", *overrides(name)], catalog=catalog)
            refuse(plan)
            reasons = match(plan, catalog=catalog).reasons
            own = _modules(plan)
        except UniRLError as error:
            reasons, own = (str(error),), list[str]()
        if reasons:
            refused[name] = " ".join(map(str, reasons))
        else:
            fitting.append(name)
            modules += own
    return Entries(algorithms=tuple(fitting), refused=refused, modules=tuple(dict.fromkeys(modules)))


def _modules(plan: Plan) -> list[str]:
    """Modules that build the parts of a plan."""
    (stage,) = plan.stages
    parts = [stage.model, stage.engine, stage.backend, stage.algorithm, *plan.rewards.values()]
    return [part.spec.build.partition(":")[0] for part in parts if part is not None]


def score_key(recipe: str, overrides: Sequence[str], settings: Settings, *, catalog: Catalog) -> str:
    """The metric of evaluations that is compared: of the settings, or the recipe's first reward."""
    rewards = compose(recipe, overrides, catalog=catalog).rewards
    if not settings.score and not rewards:
        raise RecipeError(f"{recipe}: it has no reward to compare by; name a metric with --score.")
    return settings.score or f"reward/{next(iter(rewards))}"


def run_all(jobs: Iterable[Job], folder: Path, *, again: bool, said: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every job that has no result yet, one after the other, and return the records of all.

    A run that was interrupted has no result, and is done again from its start. again: failed runs, too.
    """
    records: list[dict[str, Any]] = []
    for job in jobs:
        where = folder / "runs" / f"{job.algorithm}-{job.seed}"
        label, record = f"{job.algorithm}, seed {job.seed}", _result(where, job)
        if record is None or (again and record["status"] != "done"):
            said(f"{label}: running")
            record = _run(job, where)
        else:
            label += " (finished before)"
        points = record.get("points")
        said(f"{label}: {record['error'] or 'done'}" + (f", {points[-1]['steps']} steps" if points else ""))
        records.append({"algorithm": job.algorithm, "seed": job.seed, **record})
    return records


def _result(where: Path, job: Job) -> dict[str, Any] | None:
    """The result of this job; None without one. Raises RecipeError where the folder has another job's."""
    if not (where / RESULT).is_file():
        return None
    before = json.loads((where / JOB).read_text(encoding="utf-8"))
    if before != _plain(job):
        raise RecipeError(
            f"{where}: holds a run with other settings. Use another folder for this league, `--dir`, or delete the run."
        )
    return json.loads((where / RESULT).read_text(encoding="utf-8"))


def _run(job: Job, where: Path) -> dict[str, Any]:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    replace_text(where / JOB, json.dumps(_plain(job), indent=1))
    code = run_process(where / JOB, where / "output.txt")
    if not (where / RESULT).is_file():
        # Killed, for memory perhaps: that is a result as well.
        lines = (where / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        text = f"the process ended with code {code}; its last line: {lines[-1] if lines else 'none'}"
        replace_text(where / RESULT, json.dumps({"status": "failed", "error": text}))
    return json.loads((where / RESULT).read_text(encoding="utf-8"))


def _plain(job: Job) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(json.dumps(asdict(job))))
