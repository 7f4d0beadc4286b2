"""Settings of a plan that trade exact numbers for speed or memory, and those that an algorithm cannot train with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..acceleration import InEffect, in_effect
from ..limits import Reason
from .stage_keys import of_stage

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["acceleration_problems", "accelerations"]


def accelerations(plan: Plan) -> list[InEffect]:
    """All of a plan that take effect, each once, in the order of its sections."""
    result = [*in_effect(plan.run, key="run")]
    for stage in plan.stages:
        at = of_stage(plan, stage)
        result += in_effect(stage.sampling, key=at("sampling"))
        if stage.algorithm is not None:
            result += in_effect(stage.train, key=at("train"))
    for choice in plan.choices:
        result += in_effect(choice.config, key=choice.key)
    return list({one.key: one for one in result}.values())


def acceleration_problems(stage: Stage) -> Iterator[Reason]:
    """A reason for each setting that changes rollouts alone without a bound, so that another policy generates than the
    one that trains, under an algorithm that compares log-probs of both and does not correct for it."""
    if stage.algorithm is None or stage.needs.log_probs == "none":
        return
    key = stage.algorithm.spec.correction_key
    by_ratio = stage.needs.staleness == "ratio"
    if key and getattr(stage.algorithm.config, key) != "none":
        return
    if by_ratio and stage.train.old_log_probs == "engine":
        return
    ways = [f"correct for it with {stage.algorithm.key}.{key}"] if key else []
    ways += ["take ratios to the policy that generated, by train.old_log_probs=engine"] if by_ratio else []
    advice = ", or ".join(["Leave it out", *ways, "use an algorithm without log-probs of samples"])
    for one in in_effect(stage.engine.config, key=stage.engine.key):
        if one.scope == "rollout" and one.loss == "unbounded":
            yield Reason(
                key=one.key,
                text=f"got {one.value!r}, which changes what rollouts compute, and training not, without a bound; "
                f"algorithm {stage.algorithm.name!r} needs log-probs of the policy that trains. {advice}.",
            )
