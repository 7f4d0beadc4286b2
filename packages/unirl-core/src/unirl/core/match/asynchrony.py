"""Checks of asynchronous settings: overlapping rewards with generation, and rollouts generated ahead of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..specs.capability import Cap

if TYPE_CHECKING:
    from ..specs.plan import Plan, Stage

__all__ = ["asynchrony"]


def asynchrony(plan: Plan) -> Iterator[Reason]:
    """Yields a reason for each asynchronous setting that the plan cannot honour."""
    groups, there = plan.run.reward_overlap_groups, plan.data.prompts_per_step
    if groups >= there:
        yield Reason(
            key="run.reward_overlap_groups",
            text=f"got chunks of {groups} groups; a rollout has {there} (data.prompts_per_step), so no reward would "
            "overlap with generation. Use fewer, or 0.",
        )
    if plan.run.max_staleness > 0:
        for stage in plan.trained:
            yield from _stale_samples(plan, stage)
        for stage in plan.stages:
            if stage.backend is not None:
                yield from _own_weights(plan, stage)


def _stale_samples(plan: Plan, stage: Stage) -> Iterator[Reason]:
    assert stage.algorithm is not None
    ahead, asks, needs = plan.run.max_staleness, f"algorithm {stage.algorithm.name!r}", stage.needs
    if needs.staleness in ("unstated", "none"):
        says = "does not state that it can" if needs.staleness == "unstated" else "cannot with these settings"
        yield Reason(
            key="run.max_staleness",
            text=f"got {ahead}, which trains on samples from older weights; {asks} {says}. Use 0.",
        )
    elif needs.staleness == "ratio" and stage.train.old_log_probs != "engine":
        yield Reason(
            key="train.old_log_probs",
            text=f"got {stage.train.old_log_probs!r}, which takes ratios to the current weights; with "
            f"run.max_staleness={ahead}, {asks} needs ratios to the policy that generated the samples. Set "
            "train.old_log_probs=engine.",
        )


def _own_weights(plan: Plan, stage: Stage) -> Iterator[Reason]:
    ahead, launcher = plan.run.max_staleness, plan.launcher
    separates = launcher.spec.separates if launcher is not None else None
    if launcher is None or separates is None:
        if Cap.WEIGHTS_SHARED in stage.engine.spec.capabilities:
            yield Reason(
                key="run.max_staleness",
                text=f"got {ahead}; engine {stage.engine.name!r} shares its weights with training, which would change "
                "them during a rollout. Choose an engine with its own weights, or launcher=ray "
                "launcher.placement=separate.",
            )
        elif stage.engine.has(Cap.SLEEP):
            switches = stage.engine.spec.enabled_by.get(Cap.SLEEP, {})
            settings = " ".join(f"{stage.engine.key}.{name}={json.dumps(value)}" for name, value in switches.items())
            yield Reason(
                key="run.max_staleness",
                text=f"got {ahead}, which generates while this process trains; engine {stage.engine.name!r} sleeps "
                f"meanwhile{f' ({settings})' if settings else ''}. Use 0, or an engine that stays awake.",
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
