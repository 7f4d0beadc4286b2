"""The stages of a plan as plain data: what a run records, and what draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..specs.plan import Plan

__all__ = ["stage_facts"]


def stage_facts(plan: Plan) -> list[dict[str, Any]]:
    """Of each stage, parents first: names of its parts, `parent` and `algorithm` None where there is none, and the
    samples of each row of its parent or of each prompt."""
    return [
        {
            "name": stage.name,
            "parent": stage.parent,
            "samples": stage.samples,
            "medium": stage.medium,
            "learner": stage.learner.name,
            "model": stage.model.name,
            "engine": stage.engine.name,
            "algorithm": None if stage.algorithm is None else stage.algorithm.name,
            "rewards": list(stage.rewards),
            "credit": stage.settings.credit,
        }
        for stage in plan.stages
    ]
