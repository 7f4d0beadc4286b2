"""Plans of a single stage, made of chosen parts without a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from unirl.core.recipe.stages import stages_of
from unirl.core.specs.config import DataConfig, RecipeConfig, RunConfig, StageConfig, TrainConfig
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import Kind, Spec
from unirl.core.types.sampling import SamplingConfig

__all__ = ["choice_of_the_kit", "plan_of"]

DIST = "unirl-conformance"


def choice_of_the_kit(spec: Spec, config: PartConfig) -> Choice[Any, Any]:
    """A part that no plugin provides."""
    return Choice(key=spec.kind, spec=spec, config=config, dist=DIST, version=version(DIST))


def plan_of(
    parts: Mapping[Kind, Choice[Any, Any]],
    *,
    track: str,
    sampling: SamplingConfig,
    rewards: Mapping[str, Choice[Any, Any]] | None = None,
    run: RunConfig | None = None,
    data: DataConfig | None = None,
    train: TrainConfig | None = None,
) -> Plan:
    recipe = RecipeConfig(
        run=run or RunConfig(),
        data=data or DataConfig(train=""),
        stages={track: StageConfig(track=track)},
        sampling=sampling,
        train=train or TrainConfig(),
    )
    return Plan(
        recipe="conformance",
        stages=stages_of(recipe, {kind: {"": choice} for kind, choice in parts.items()}, rewards or {}),
        rewards=rewards or {},
        trackers={},
        run=recipe.run,
        data=recipe.data,
        eval=recipe.eval,
        resolved={},
        origins={},
        hash="",
    )
