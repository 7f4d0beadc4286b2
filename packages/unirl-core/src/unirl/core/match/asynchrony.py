"""Checks of asynchronous settings: overlapping rewards with generation, and rollouts generated ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..specs.capability import Cap, Needs, Support

if TYPE_CHECKING:
    from ..specs.plan import Plan

__all__ = ["asynchrony"]


def asynchrony(plan: Plan, needs: Needs) -> Iterator[Reason]:
    """Yields a reason for each asynchronous setting that the plan cannot honour.

    needs: of the algorithm with its settings.
    """
    groups, there = plan.run.reward_overlap_groups, plan.data.prompts_per_step
    if groups >= there:
        yield Reason(
            key="run.reward_overlap_groups",
            text=f"got chunks of {groups} groups; a rollout has {there} (data.prompts_per_step), so no reward would "
            "overlap with generation. Use fewer, or 0.",
        )
    if plan.run.max_staleness > 0:
        yield from _stale_samples(plan, needs)
        yield from _own_weights(plan)


def _stale_samples(plan: Plan, needs: Needs) -> Iterator[Reason]:
    ahead, asks = plan.run.max_staleness, f"algorithm {plan.algorithm.name!r}"
    if needs.staleness in ("unstated", "none"):
        says = "does not state that it can" if needs.staleness == "unstated" else "cannot with these settings"
        yield Reason(
            key="run.max_staleness",
            text=f"got {ahead}, which trains on samples from older weights; {asks} {says}. Use 0.",
        )
    elif needs.staleness == "ratio" and plan.train.old_log_probs != "engine":
        yield Reason(
            key="train.old_log_probs",
            text=f"got {plan.train.old_log_probs!r}, which takes ratios to the current weights; with "
            f"run.max_staleness={ahead}, {asks} needs ratios to the policy that generated the samples. Set "
            "train.old_log_probs=engine.",
        )


def _own_weights(plan: Plan) -> Iterator[Reason]:
    ahead, launcher = plan.run.max_staleness, plan.launcher
    separates = launcher.spec.separates if launcher is not None else None
    if launcher is None or separates is None:
        if plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE:
            yield Reason(
                key="run.max_staleness",
                text=f"got {ahead}; engine {plan.engine.name!r} shares its weights with training, which would change "
                "them during a rollout. Choose an engine with its own weights, or launcher=ray "
                "launcher.placement=separate.",
            )
        return
    for name, expected in separates.items():
        result = getattr(launcher.config, name)
        if result != expected:
            yield Reason(
                key=f"launcher.{name}",
                text=f"got {result!r}, where the same workers generate and train; run.max_staleness={ahead} needs both "
                f"to run at the same time. Set launcher.{name}={expected}.",
            )
