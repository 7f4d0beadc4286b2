"""Evaluation: held-out prompts, their own sampling settings, the same noise every time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ..observe.events import EventStream
from ..observe.tracking import Trackers
from ..types.data import Prompt
from .parts import Parts, attributed, generate, sampled_policy, sync_weights
from .requests import evaluation_requests
from .scoring import score

if TYPE_CHECKING:
    from ..roles import Policy
    from ..specs.plan import Plan

__all__ = ["evaluate"]


def evaluate(
    parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int, events: EventStream, trackers: Trackers
) -> dict[str, float]:
    """Generate and score the held-out samples, and emit `evaluated` with their means.

    The noise is keyed on `eval.seed` and the prompt, not on the step, so that two evaluations differ by the weights
    alone. `share_at_threshold` is the share of samples whose reward is at least `eval.threshold`.
    """
    started = time.perf_counter()
    sync_weights(parts, plan)
    requests = evaluation_requests(parts, plan, prompts)
    owner = f"engine {plan.engine.name!r}"
    with attributed(owner, phase="evaluate"), sampled_policy(parts, plan, cast("Policy", plan.eval.policy)):
        rollout = generate(parts.engine, requests)
    metrics: dict[str, float] = {}
    for name, unscored in rollout.tracks.items():
        track = score(unscored, parts.rewards, parts.reward_weights)
        prefix = f"{name}/" if len(rollout.tracks) > 1 else ""
        if track.rewards is not None:
            metrics[f"{prefix}score_mean"] = float(track.rewards.mean())
            if plan.eval.threshold is not None:
                # Scores are sums of floats: a sample that meets the threshold exactly must not miss it by rounding.
                reached = track.rewards >= plan.eval.threshold - 1e-6
                metrics[f"{prefix}share_at_threshold"] = float(reached.float().mean())
        metrics |= {f"{prefix}reward/{part}": float(v.mean()) for part, v in track.reward_parts.items()}
        trackers.samples("eval", track, step=step)
    seconds = time.perf_counter() - started
    events.emit("evaluated", step=step, metrics=metrics, samples=rollout.num_samples, phases={"evaluate": seconds})
    return metrics
