"""One run of a league, in a separate process: `python -m unirl.league.run JOB.json`."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.disk import replace_text
from unirl.core.errors import RecipeError, UniRLError

from .budget import Budget, Spent

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = ["Job", "main", "refuse", "run_job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One algorithm and seed."""

    recipe: str
    algorithm: str
    seed: int
    overrides: tuple[str, ...]
    """Overrides without algorithm and seed."""
    budget: Budget
    intervals: int
    """Evaluations after the one at the start, at equal shares of the budget."""
    score: str
    """Metric of the evaluations that is compared."""

    @property
    def all_overrides(self) -> list[str]:
        """For compose. The loop below decides when to evaluate and to stop."""
        steps = math.ceil(self.budget.amount) if self.budget.unit == "steps" else 10**9
        own = [f"run.seed={self.seed}", f"run.max_steps={steps}", "run.media_every=0", "tracker=null"]
        return [f"algorithm={self.algorithm}", *self.overrides, *own]


def main(file: Path) -> int:
    """Run the job in a file and write `result.json` beside it, whatever happens."""
    given = json.loads(file.read_text(encoding="utf-8"))
    job = Job(**{**given, "budget": Budget(**given["budget"]), "overrides": tuple(given["overrides"])})
    started_by = os.getppid()
    result: dict[str, Any] = {"status": "done", "error": ""}
    try:
        result |= run_job(job, file.parent)
    except Exception as error:  # noqa: BLE001 - recorded, and shown in the table
        own = isinstance(error, UniRLError)
        result |= {"status": "failed", "error": str(error) if own else f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    if os.getppid() != started_by:
        # The league was killed, and may continue elsewhere with a new run in this folder.
        return 1
    replace_text(file.parent / "result.json", json.dumps(result, indent=1))
    return 0 if result["status"] == "done" else 1


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """Train until the budget is spent. Returns `points`, one for each evaluation, and what else was measured."""
    from unirl.core.data.prompts import PromptOrder
    from unirl.core.data.run_data import read_data
    from unirl.core.observe.events import EventStream
    from unirl.core.observe.tracking import Trackers
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.recipe.compose import compose
    from unirl.loop.build import built_parts
    from unirl.loop.evaluation import evaluate
    from unirl.loop.step import run_step

    from .meter import Meter
    from .start import StartPolicy

    catalog = Catalog.discover()
    plan = compose(job.recipe, job.all_overrides, catalog=catalog)
    refuse(plan)
    data, events = read_data(plan), EventStream(folder / "events.jsonl")
    steps: list[Mapping[str, Any]] = []
    points: list[dict[str, Any]] = []
    order = PromptOrder(len(data.prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    events.listen(lambda event: steps.append(event.data) if event.kind == "step" else None)
    with built_parts(plan, catalog=catalog) as parts:
        trackers = Trackers({}, events)
        (model,) = parts.models.values()
        start, meter, following = StartPolicy(model.trainable), Meter(model.trainable), 1

        def evaluated(spent: Spent) -> None:
            metrics = evaluate(parts, plan, data.held_out, step=spent.steps, events=events, trackers=trackers)
            if job.score not in metrics:
                raise RecipeError(f"--score: got {job.score!r}; evaluations have {', '.join(sorted(metrics))}.")
            kl = start.kl(parts, plan, data.held_out)
            points.append({**asdict(spent), "metrics": metrics, "distance": start.distance(), "kl": kl})

        evaluated(meter.spent)
        while job.budget.of(meter.spent) < 1:
            step = meter.spent.steps
            most = plan.data.dynamic_sampling_rounds * plan.data.prompts_per_step
            rows = order.step(step), order.spare(step, most) if most else ()
            chosen, spare = ([data.prompts[row] for row in each] for each in rows)
            meter.begin()
            run_step(parts, plan, [*chosen, *spare], step=step, events=events, trackers=trackers)
            spent = meter.end(samples=int(steps[-1]["samples"]))
            intervals_spent = job.budget.of(spent) * job.intervals
            if intervals_spent >= following:
                evaluated(spent)
                following = math.floor(intervals_spent) + 1
    events.close()
    last = steps[-1]["metrics"]
    return {"points": points, "last_step": last, "hash": plan.hash, "peak_memory_mib": _peak_memory_mib()}


def refuse(plan: Plan) -> None:
    """Refuse plans whose cost this process cannot count."""
    if len(plan.stages) > 1:
        raise RecipeError(f"{plan.recipe}: a league compares algorithms of one stage; this recipe has several.")
    if plan.launcher is not None and plan.launcher.name != "local":
        raise RecipeError(f"launcher: got {plan.launcher.name!r}, expected local: a league counts in one process.")
    if plan.run.max_staleness:
        raise RecipeError(
            "run.max_staleness: got more than 0; a league counts the cost of each step alone. Set it to 0."
        )
    if not plan.data.eval:
        raise RecipeError("data.eval: got none; a league compares by held-out prompts.")


def _peak_memory_mib() -> float:
    """Largest resident set of this process. Linux counts KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
