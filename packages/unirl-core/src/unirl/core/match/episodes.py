"""Whether the stages with an environment can run episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..roles.environment import RETURN
from ..specs.capability import Cap
from .wording import lacks

if TYPE_CHECKING:
    from ..specs.plan import Plan

__all__ = ["episodes"]


def episodes(plan: Plan) -> Iterator[Reason]:
    """Yields a reason for each stage whose texts its environment cannot answer."""
    for stage in plan.stages:
        if (environment := stage.environment) is None:
            continue
        got, model, engine = f"got {environment.name!r}", stage.model.spec, stage.engine
        if stage.medium != "text":
            text = f"{got}, but stage {stage.name!r} generates {stage.medium}; expected a stage of texts."
            yield Reason(key=environment.key, text=text)
            continue
        if engine.spec.samples:
            text = f"{got}, but engine {engine.name!r} reads stored texts and generates none. Choose one that does."
            yield Reason(key=environment.key, text=text)
        if rules := {stage.track} & (model.restricts | model.token_options):
            text = (
                f"{got}, but model {model.name!r} has rules for the next token of track {next(iter(rules))!r}, which "
            )
            yield Reason(key=environment.key, text=f"{text}observations may break. Choose another model.")
        yield from lacks(stage.model.key, model, Cap.OBSERVATIONS, asks=f"{environment.key} {environment.name!r}")
        if RETURN in stage.rewards:
            text = f"the return of {environment.key} has this name in metrics; name the reward otherwise."
            yield Reason(key=f"reward.{RETURN}", text=text)
        if RETURN in (stage.name, *(child.name for child in plan.children(stage.name))):
            text = f"the return of {environment.key} has this name in metrics; name the stage otherwise."
            yield Reason(key=f"stages.{RETURN}", text=text)
        if stage.needs.reward == "differentiable":
            assert stage.algorithm is not None
            text = (
                f"{got}, but algorithm {stage.algorithm.name!r} backpropagates rewards, and a return has no gradient."
            )
            yield Reason(key=environment.key, text=text)
