"""The part of a plan that a worker builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from unirl.core.specs.plan import Plan, Stage

__all__ = ["WorkerRole", "plan_of_worker"]

WorkerRole = Literal["train", "rollout", "reference", "reward"]


def plan_of_worker(plan: Plan, *, role: WorkerRole, device: str, serves: Sequence[str]) -> Plan:
    """The plan on a worker's device, with the stages that it generates. serves: as `Worker.build` takes it."""
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, device=device))
    if role in ("rollout", "reference"):
        plan = plan.with_stages(_without_training)
    if role == "rollout" and serves:
        plan = dataclasses.replace(plan, stages=tuple(stage for stage in plan.stages if stage.name in serves))
    return plan


def _without_training(stage: Stage) -> Stage:
    """The stage for a process with complete weights that does not train: without the train ranks' mesh, critic, fake
    score and teachers."""
    stage = dataclasses.replace(stage, teachers=())
    if stage.backend is None:
        return stage
    config: Any = stage.backend.config
    names = {item.name for item in dataclasses.fields(config)} & {"mesh", "critic", "fake_score"}
    own = {name: type(getattr(config, name))() for name in names}
    backend = dataclasses.replace(stage.backend, config=dataclasses.replace(config, **own))
    return dataclasses.replace(stage, learner=dataclasses.replace(stage.learner, backend=backend))
