"""A plan with what only its run knows: the run folder, and batch-invariant engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["with_batch_invariance", "with_run_folder"]


def with_batch_invariance(plan: Plan) -> Plan:
    """The plan with `engine.batch_invariant` set if the run is batch-invariant and the engine has such a mode."""
    if not plan.run.batch_invariant:
        return plan
    return plan.with_stages(
        lambda stage: _with_engine(
            stage, {"batch_invariant": True} if "batch_invariant" in vars(stage.engine.config) else {}
        )
    )


def with_run_folder(plan: Plan, folder: Path) -> Plan:
    """The plan with this run folder as `run.dir`, which also replaces `{run}` in its engines' settings.

    With several stages `{part}` gets the stage before it, the first one of its engine, so that two engines of one kind
    do not share a file.
    """
    path = str(folder.resolve())

    def prefix(stage: Stage) -> str:
        return plan.prefix(next(first for first in plan.stages if first.shares_engine(stage)))

    return dataclasses.replace(plan, run=dataclasses.replace(plan.run, dir=path)).with_stages(
        lambda stage: _with_engine(
            stage,
            {
                name: text.replace("{part}", prefix(stage) + "{part}").replace("{run}", path)
                for name, text in vars(stage.engine.config).items()
                if isinstance(text, str) and "{run}" in text
            },
        )
    )


def _with_engine(stage: Stage, settings: Mapping[str, Any]) -> Stage:
    """The stage with these settings of its engine."""
    if not settings:
        return stage
    config = dataclasses.replace(stage.engine.config, **settings)
    return dataclasses.replace(stage, engine=dataclasses.replace(stage.engine, config=config))
