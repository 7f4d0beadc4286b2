"""One job of `unirl train`: checked with `match`, then run with a progress display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.errors import PlanRejected

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.plan import Plan

    from ..run import RunResult
    from .progress import RunSummary

__all__ = ["refuse_unless_matched", "run_plan"]


def refuse_unless_matched(plan: Plan, *, catalog: Catalog) -> None:
    """Raise PlanRejected with every reason, before anything heavy is imported."""
    from unirl.core.match.match import match

    verdict = match(plan, catalog=catalog)
    if not verdict.accepted:
        reasons = "\n".join(f"  {reason}" for reason in verdict.reasons)
        raise PlanRejected(f"{plan.recipe} was refused, for {len(verdict.reasons)} reason(s):\n{reasons}")


def run_plan(
    plan: Plan, *, overrides: Sequence[str], catalog: Catalog, resume: Path | None = None, continues: bool = False
) -> tuple[RunResult, RunSummary]:
    """Train a plan with a progress display. resume, continues: see `unirl.loop.run.train`."""
    from .progress import RunSummary, show_progress

    summary = RunSummary()
    with show_progress() as progress:
        from ..run import train

        listeners = (progress, summary)
        result = train(
            plan, catalog=catalog, resume=resume, continues=continues, overrides=overrides, listeners=listeners
        )
    return result, summary
