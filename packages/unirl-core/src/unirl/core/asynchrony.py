"""What streaming and rollouts ahead ask of a plan: the part of `match` that is about doing things at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .capability import Cap, Needs, Support

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["asynchrony"]


def asynchrony(plan: Plan, needs: Needs) -> Iterator[tuple[str, str]]:
    """Why a plan cannot do at once what it asks for: key path and sentence of each reason.

    needs: of the algorithm with its settings.
    """
    yield from _streaming(plan)
    ahead = plan.run.rollout_ahead
    if ahead < 0:
        yield "run.rollout_ahead", f"{ahead} was asked for; it must be 0 or more."
    if ahead > 0:
        yield from _stale_samples(plan, needs)
        yield from _own_weights(plan)


def _streaming(plan: Plan) -> Iterator[tuple[str, str]]:
    groups, there = plan.run.stream_groups, plan.data.prompts_per_step
    if groups < 0:
        yield "run.stream_groups", f"{groups} was asked for; it must be 0 or more."
    elif groups and groups >= there:
        yield (
            "run.stream_groups",
            f"pieces of {groups} groups were asked for; a rollout has {there} (data.prompts_per_step), so nothing "
            "would be scored while it is generated. Use fewer, or 0.",
        )


def _stale_samples(plan: Plan, needs: Needs) -> Iterator[tuple[str, str]]:
    ahead, asks = plan.run.rollout_ahead, f"algorithm {plan.algorithm.name!r}"
    if needs.staleness in ("unstated", "none"):
        says = "does not state that it can" if needs.staleness == "unstated" else "cannot with these settings"
        yield (
            "run.rollout_ahead",
            f"{ahead} was asked for, which trains on samples of older weights; {asks} {says}. Use 0.",
        )
    elif needs.staleness == "ratio" and plan.train.old_log_probs != "engine":
        yield (
            "train.old_log_probs",
            f"under run.rollout_ahead={ahead}, {asks} corrects for the age of samples by the ratio to the policy that "
            f"made them; {plan.train.old_log_probs!r} compares with the weights that train instead. Set "
            "train.old_log_probs=engine.",
        )


def _own_weights(plan: Plan) -> Iterator[tuple[str, str]]:
    ahead, launcher = plan.run.rollout_ahead, plan.launcher
    separates = launcher.spec.separates if launcher is not None else None
    if launcher is None or separates is None:
        if plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE:
            yield (
                "run.rollout_ahead",
                f"{ahead} was asked for; engine {plan.engine.name!r} samples from the very weights that training "
                "changes meanwhile. Choose an engine with weights of its own, or launcher=ray "
                "launcher.placement=separate.",
            )
        return
    for name, wanted in separates.items():
        found = getattr(launcher.config, name)
        if found != wanted:
            yield (
                f"launcher.{name}",
                f"under run.rollout_ahead={ahead} rollouts are made while training runs; with {found!r} the same "
                f"workers do both. Set launcher.{name}={wanted}.",
            )
