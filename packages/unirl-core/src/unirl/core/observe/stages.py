"""The stages of a plan as plain data, to record with a run and to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..specs.plan import Plan

__all__ = ["stage_facts"]


def stage_facts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of each stage, parents first: names of its parts, with None for a missing `parent` or `algorithm`, and its
    samples per row of the parent or per prompt."""
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
