"""Evaluation: held-out prompts, their own sampling settings, the same noise every time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.types.data import Prompt
from unirl.core.types.rollout import Rollout

from .generation import generate_stages, kept_images
from .lineage import cut_texts, fallbacks
from .parts import Parts, attributed, sync_weights
from .requests import evaluation_requests
from .scoring import check_scored, known, mean_parts, reaches, score
from .unfinished import check_finished, left_out

if TYPE_CHECKING:
    from unirl.core.roles import Policy
    from unirl.core.specs.plan import Plan

__all__ = ["evaluate"]


def evaluate(
    parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int, events: EventStream, trackers: Trackers
) -> dict[str, float]:
    """Generate and score the held-out samples, and emit `evaluated` with their means.

    The noise is keyed on `eval.seed` and the prompt, not on the step, so that two evaluations differ by the weights
    alone; rewards count with their `weight`, whatever their schedules. `share_at_threshold` is the share of samples
    whose reward is at least `eval.threshold`. Samples without a score are left out of both.
    """
    started = time.perf_counter()
    sync_weights(parts, plan)
    policy = cast("Policy", plan.eval.policy)
    with kept_images(plan, "eval"):
        tracks = generate_stages(
            parts,
            plan,
            evaluation_requests(parts, plan, prompts),
            versions={stage.name: parts.version(stage, policy) for stage in plan.stages},
            during=lambda stage: attributed(f"engine {stage.engine.name!r}", phase="evaluate"),
            evaluated=policy,
        )
        check_finished(tracks, plan)
        metrics = left_out(tracks, plan) | fallbacks(tracks, plan)
        metrics |= cut_texts(tracks, plan, parts.models, evaluates=True)
        for stage in plan.stages:
            rewards = {key: parts.rewards[key] for key in stage.rewards}
            track = tracks[stage.name] = score(tracks[stage.name], rewards, parts.reward_weights, plan.rewards)
            check_scored(track, rewards)
            prefix = plan.prefix(stage)
            if track.rewards is not None:
                scores = known(track.rewards)
                metrics[f"{prefix}score_mean"] = float(scores.mean())
                if plan.eval.threshold is not None:
                    metrics[f"{prefix}share_at_threshold"] = float(reaches(scores, plan.eval.threshold).float().mean())
            metrics |= {prefix + key: value for key, value in mean_parts(track).items()}
        rollout = Rollout(tracks=tracks)
        trackers.samples("eval", rollout, step=step)
    seconds = time.perf_counter() - started
    events.emit("evaluated", step=step, metrics=metrics, samples=rollout.num_samples, phases={"evaluate": seconds})
    return metrics
