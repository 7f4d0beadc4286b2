"""Plans of one stage, made without a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.core.recipe.stages import stages_of
from unirl.core.specs.config import RecipeConfig, StageConfig
from unirl.core.specs.plan import Choice, Plan

__all__ = ["changed", "one_stage"]

PARTS = ("model", "backend", "engine", "algorithm")
OF_A_STAGE = ("algorithm", "engine", "sampling", "advantage", "train", "samples", "eval_sampling")


def one_stage(
    *,
    model: Choice[Any, Any],
    backend: Choice[Any, Any],
    engine: Choice[Any, Any],
    algorithm: Choice[Any, Any],
    track: str,
    rewards: Mapping[str, Choice[Any, Any]] | None = None,
    recipe: str = "toy",
    **sections: Any,
) -> Plan:
    """A plan of one stage. sections: of the recipe, such as `sampling` and `run`."""
    filled = RecipeConfig(stages={track: StageConfig(track=track)}, **sections)
    chosen = dict(zip(PARTS, ({"": part} for part in (model, backend, engine, algorithm)), strict=True))
    return Plan(
        recipe=recipe,
        stages=stages_of(filled, chosen, rewards or {}),
        rewards=rewards or {},
        trackers={},
        run=filled.run,
        data=filled.data,
        eval=filled.eval,
        resolved={},
        origins={},
        hash="",
    )


def changed(plan: Plan, **changes: Any) -> Plan:
    """The plan with other parts or settings of its only stage, or other fields of the plan itself."""
    stage = plan.only
    learner = dataclasses.replace(
        stage.learner, **{key: changes.pop(key) for key in ("model", "backend") if key in changes}
    )
    own = {key: changes.pop(key) for key in OF_A_STAGE if key in changes}
    if "rewards" in changes:
        own["rewards"] = tuple(changes["rewards"])
    if "data" in changes:
        own.setdefault("samples", changes["data"].samples_per_prompt)
    if "eval" in changes:
        own.setdefault("eval_sampling", changes["eval"].sampling)
    return dataclasses.replace(plan, stages=(dataclasses.replace(stage, learner=learner, **own),), **changes)
