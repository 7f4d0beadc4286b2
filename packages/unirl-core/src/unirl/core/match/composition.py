"""Checks of how rewards become one: clipping, gates, and weights over the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from ..limits import Reason
from ..names import did_you_mean
from ..specs.spec import RESERVED_PARTS

if TYPE_CHECKING:
    from ..specs.part_config import RewardConfig
    from ..specs.plan import Choice, Plan, RewardChoices
    from ..specs.spec import RewardSpec

__all__ = ["composition", "counted_range", "weighted_rewards", "without_rewards"]

PAIRS = [[step, factor] for step in (int, float) for factor in (int, float)]


def counted_range(choice: Choice[RewardSpec, RewardConfig]) -> tuple[float, float]:
    """The lowest and the highest score of a reward that can count."""
    low, high = choice.config.clip or choice.spec.range
    return low, high


def weighted_rewards(rewards: RewardChoices, weights: Mapping[str, float]) -> list[str]:
    """Keys of the rewards with a weight, and of those that gate them."""
    keys = [key for key, weight in weights.items() if weight]
    for key in keys:
        gate = rewards[key].config.gate.reward
        if gate in rewards and gate not in keys:
            keys.append(gate)
    return keys


def composition(plan: Plan) -> Iterator[Reason]:
    schedules = [reason for key, choice in plan.rewards.items() for reason in _schedule(key, choice.config)]
    yield from schedules
    for key, choice in plan.rewards.items():
        (low, high), (least, most) = counted_range(choice), choice.spec.range
        if not low < high or low >= most or high <= least:
            yield Reason(
                key=f"reward.{key}.clip",
                text=f"got [{low:g}, {high:g}], expected [low, high] between which scores of reward {choice.name!r} "
                f"differ; they are {least:g} to {most:g}.",
            )
        for part in (part for part in choice.spec.parts if part in RESERVED_PARTS):
            yield Reason(key=f"reward.{key}", text=f"{choice.dist} names a component {part!r}, which is reserved.")
        yield from _gate(plan, key)
    returns = any(stage.environment is not None and stage.environment.config.weight for stage in plan.stages)
    if schedules or returns or not plan.rewards or all(stage.needs.reward == "none" for stage in plan.trained):
        # Rewards that no loss reads are logged.
        return
    # Weights are linear between the steps of their schedules, so where all of them are 0, they are at such a step.
    steps = {0.0, *(point[0] for choice in plan.rewards.values() for point in choice.config.schedule)}
    for step in sorted(step for step in steps if step < max(plan.run.max_steps, 1)):
        if not any(choice.config.weight_at(step) for choice in plan.rewards.values()):
            when = f" at step {step:g}" if len(steps) > 1 else ""
            text = f"every reward has weight 0{when}, so there is no training signal; raise one."
            yield Reason(key="reward", text=text)
            return


def _gate(plan: Plan, key: str) -> Iterator[Reason]:
    choice = plan.rewards[key]
    name, at_least, where = choice.config.gate.reward, choice.config.gate.at_least, f"reward.{key}.gate"
    if not name:
        if at_least is not None:
            yield Reason(key=f"{where}.at_least", text=f"got {at_least:g} of no reward; set {where}.reward as well.")
        return
    if name not in plan.rewards:
        known = ", ".join(plan.rewards)
        yield Reason(
            key=f"{where}.reward", text=f"got {name!r}; the rewards are {known}{did_you_mean(name, plan.rewards)}"
        )
        return
    low, high = plan.rewards[name].spec.range
    if at_least is None or not low < at_least <= high:
        yield Reason(
            key=f"{where}.at_least",
            text=f"got {'null' if at_least is None else f'{at_least:g}'}, expected a score that some samples reach and "
            f"others do not: those of reward {name!r} are {low:g} to {high:g}.",
        )
    if counted_range(choice)[0] == -float("inf"):
        yield Reason(
            key=f"reward.{key}.clip",
            text=f"got null, expected [low, high]: a sample that fails the gate gets the lowest score, and reward "
            f"{choice.name!r} has none.",
        )
    for stage in plan.stages:
        if key in stage.rewards and name not in stage.rewards:
            yield Reason(key=f"{where}.reward", text=f"got {name!r}, which does not score stage {stage.name!r}.")
    path = [key]
    while (name := plan.rewards[path[-1]].config.gate.reward) in plan.rewards and name not in path:
        path.append(name)
    if name == key:
        chain = " -> ".join([*path, key])
        yield Reason(key=f"{where}.reward", text=f"got {chain}, expected gates that end at a reward without one.")


def without_rewards(plan: Plan) -> Iterator[Reason]:
    """Settings about scores, in a plan in which nothing scores."""
    asking = {
        "run.reward_overlap_groups": plan.run.reward_overlap_groups,
        "data.dynamic_sampling_rounds": plan.data.dynamic_sampling_rounds,
        "eval.threshold": plan.eval.threshold,
    }
    for key, value in asking.items():
        if value:
            yield Reason(key=key, text=f"got {value}, but the plan has no reward; leave it out, or add a reward.")


def _schedule(key: str, config: RewardConfig) -> Iterator[Reason]:
    points, where = config.schedule, f"reward.{key}.schedule"
    are_pairs = all(isinstance(point, list) and [*map(type, cast("list[Any]", point))] in PAIRS for point in points)
    if not are_pairs or any(one[0] >= other[0] for one, other in pairwise(points)):
        yield Reason(key=where, text=f"got {points}, expected [[step, factor], ...] with rising steps.")
    elif points and not config.weight:
        yield Reason(key=where, text=f"got {points}, factors of a weight of 0; set reward.{key}.weight.")
