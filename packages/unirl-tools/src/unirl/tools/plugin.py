"""A note on runs that ran out of memory, the operations of a step, and adapters exported during a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.plugins.hookspec import hookimpl

if TYPE_CHECKING:
    from unirl.core.roles import WeightUpdate
    from unirl.core.specs.plan import Plan

__all__ = ["unirl_explain_failure", "unirl_step_flops", "unirl_write_adapters"]


@hookimpl
def unirl_explain_failure(plan: Plan, error: BaseException) -> str:
    from .plan.out_of_memory import explanation

    return explanation(plan, error)


@hookimpl
def unirl_write_adapters(plan: Plan, updates: Mapping[str, WeightUpdate], run: Path, folder: Path, step: int) -> bool:
    from .export.during_run import write_adapters

    write_adapters(plan, updates, run=run, folder=folder, step=step)
    return True


@hookimpl
def unirl_step_flops(plan: Plan) -> Mapping[str, float]:
    import torch
    from unirl.core.errors import UniRLError
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.capability import Cap

    from .plan.memory_plan import memory_plan

    if any(Cap.LAZY_BUILD not in stage.model.spec.capabilities for stage in plan.stages):
        # It would be loaded a second time.
        return {}
    try:
        # A model that is built draws initial values.
        with torch.random.fork_rng(devices=[]):
            return memory_plan(plan, catalog=Catalog.of({})).phase_flops
    except UniRLError:
        # Several stages, tensor parallelism, critics: what `unirl plan` refuses.
        return {}
