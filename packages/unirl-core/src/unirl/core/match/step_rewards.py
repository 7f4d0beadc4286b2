"""Checks of per-step rewards, which need further samples for each SDE step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..specs.capability import Cap
from .composition import weighted_rewards
from .wording import lacks

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["step_rewards"]


def step_rewards(plan: Plan) -> Iterator[Reason]:
    """Yields a reason for each part that rules out per-step rewards."""
    for stage in plan.stages:
        if stage.needs.step_rewards:
            yield from _of_stage(plan, stage)


def _of_stage(plan: Plan, stage: Stage) -> Iterator[Reason]:
    assert stage.algorithm is not None
    on = [name for name, needs in stage.algorithm.spec.when.items() if needs.step_rewards]
    key = ".".join([stage.algorithm.key, *on[:1]])
    if len(plan.stages) > 1:
        names = ", ".join(each.name for each in plan.stages)
        yield Reason(key=key, text=f"got true, expected false in a recipe of several stages ({names}).")
    for name in weighted_rewards(plan.rewards, {name: plan.rewards[name].config.weight for name in stage.rewards}):
        reward = plan.rewards[name]
        if Cap.REWARD_SAMPLE not in reward.spec.capabilities:
            yield Reason(
                key=key,
                text=f"got true, but reward {reward.name!r} (reward.{name}) scores the samples of a group against each "
                "other, so its scores before and after a step do not compare. Use rewards of single samples, or false.",
            )
    yield from lacks(stage.engine.key, stage.engine.spec, Cap.SDE_STEPS_PER_GROUP, asks=key)
