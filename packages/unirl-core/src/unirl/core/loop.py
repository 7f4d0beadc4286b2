"""The loop: rollout, reward, advantage, train, weight sync. Everything it calls is a role."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from .data import Prompt
from .errors import RewardFailed
from .evaluation import evaluate
from .events import EventStream
from .parts import Parts, attributed, sync_weights
from .plan import Plan
from .prompts import PromptOrder
from .requests import build_request
from .rollout import verify_echo
from .scoring import constant_reward, score
from .track import Track
from .tracking import Trackers

__all__ = ["Phases", "run_loop", "run_step"]


class Phases:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *, owner: str = "the loop") -> Generator[None]:
        """Time a phase, and attribute what fails in it to `owner`."""
        start = time.perf_counter()
        try:
            with attributed(owner, phase=name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def run_loop(
    parts: Parts,
    plan: Plan,
    *,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    start: int,
    events: EventStream,
    trackers: Trackers,
    save: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> tuple[int, Literal["done", "stopped"]]:
    """Run steps `start` to `run.steps`; returns the steps completed and whether they were all of them.

    A step is a pure function of its number and the weights, so a run that starts at a checkpoint goes on exactly.
    `save` is called at step boundaries only, and always before this returns.
    """
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    last, saved = plan.run.steps, start
    if held_out and start == 0:
        evaluate(parts, plan, held_out, step=0, events=events, trackers=trackers)
    for step in range(start, last):
        if should_stop() or 0 < plan.run.stop_at <= step:
            if saved != step:
                save(step)
            return step, "stopped"
        version = parts.backend.version
        try:
            run_step(parts, plan, [prompts[i] for i in order.step(step)], step=step, events=events, trackers=trackers)
        except Exception:
            if parts.backend.version == version and saved != step:
                save(step)
            raise
        done = step + 1
        if held_out and (done == last or (plan.eval.every and done % plan.eval.every == 0)):
            evaluate(parts, plan, held_out, step=done, events=events, trackers=trackers)
        if done == last or (plan.run.save_every and done % plan.run.save_every == 0):
            save(done)
            saved = done
    return last, "done"


def run_step(
    parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int, events: EventStream, trackers: Trackers
) -> None:
    """One round: rollout, reward, advantage, train. Emits `step`."""
    phases = Phases()
    engine, algorithm = f"engine {plan.engine.name!r}", f"algorithm {plan.algorithm.name!r}"
    with phases("sync", owner=engine):
        sync_weights(parts, plan)
    with phases("request", owner=algorithm):
        request = build_request(
            prompts,
            samples_per_prompt=plan.data.samples_per_prompt,
            sampling=plan.sampling,
            model=parts.model,
            algorithm=parts.algorithm,
            seed=plan.run.seed,
            rollout=step,
            policy_version=parts.backend.version,
        )
    with phases("generate", owner=engine):
        rollout = parts.engine.generate(request)
        verify_echo(request, rollout)
    metrics: dict[str, float] = {}
    for name, track in rollout.tracks.items():
        prefix = f"{name}/" if len(rollout.tracks) > 1 else ""
        found = _learn(parts, plan, track, step=step, phases=phases, trackers=trackers)
        metrics |= {prefix + key: value for key, value in found.items()}
    parts.backend.end_rollout()
    _watch_gap(plan, metrics, step=step + 1, events=events)
    events.emit("step", step=step + 1, metrics=metrics, phases=phases.seconds, samples=request.num_rows)


def _learn(
    parts: Parts, plan: Plan, track: Track, *, step: int, phases: Phases, trackers: Trackers
) -> dict[str, float]:
    """Score one track, turn the scores into advantages and train on it; returns the numbers of the step."""
    with phases("score"):
        track = score(track, parts.rewards, parts.reward_weights)
    assert track.rewards is not None
    metrics = {
        "reward_mean": float(track.rewards.mean()),
        "reward_std": float(track.rewards.std(correction=0)),
        "reward_min": float(track.rewards.min()),
        "reward_max": float(track.rewards.max()),
        **{f"reward/{part}": float(values.mean()) for part, values in track.reward_parts.items()},
    }
    if plan.run.media_every and step % plan.run.media_every == 0:
        trackers.images("train", track, step=step)
    value = constant_reward(track)
    if value is not None:
        if plan.advantage.constant_reward == "fail":
            raise RewardFailed(
                f"reward: all {track.num_rows} samples of step {step} got {value:g}: there is nothing to learn from. "
                "Look at the samples and the reward; advantage.constant_reward=skip leaves out such steps instead."
            )
        return {**metrics, "steps_skipped": 1.0}
    with phases("advantages", owner=f"algorithm {plan.algorithm.name!r}"):
        track, found = parts.algorithm.advantages(track)
    with phases("train", owner=f"backend {plan.backend.name!r} with algorithm {plan.algorithm.name!r}"):
        progress = step / max(1, plan.run.steps - 1)
        report = parts.backend.train(track, parts.algorithm, progress=progress)
    return {**metrics, **found, **report.metrics, "updates": report.num_updates, "updates_skipped": report.num_skipped}


def _watch_gap(plan: Plan, metrics: Mapping[str, float], *, step: int, events: EventStream) -> None:
    """Say once when the engine's log-probs are off by more than half of what is allowed; past it the stack stops."""
    bound = plan.logp_gap_max
    for key, gap in metrics.items():
        if key.endswith("logp_gap_max") and bound is not None and gap > bound / 2:
            text = f"{key}: log-probs of engine {plan.engine.name!r} differ by {gap:.2e}; the run stops at {bound:.2e}."
            events.finding(text, step=step, once="logp_gap")
