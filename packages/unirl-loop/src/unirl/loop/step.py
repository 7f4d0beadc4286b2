"""The loop: rollout, reward, advantage, train, weight sync. Everything it calls is a role."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from unirl.core.data.prompts import PromptOrder
from unirl.core.errors import RewardFailed, RunFailed, UniRLError
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import Job
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.data import Prompt
from unirl.core.types.rollout import Rollout

from .algorithm_state import algorithm_state, end_algorithm_step
from .costs import track_bytes
from .evaluation import evaluate
from .generation import kept_images
from .lineage import cut_texts, fallbacks
from .parts import Parts, attributed, engine_names, stage_job
from .phases import Phases
from .queue import GroupQueue
from .reward_watch import RewardWatch
from .saved_samples import save_samples
from .scoring import constant_reward, has_advantages
from .scouts import scout_metrics
from .step_metrics import drawn_metrics, overlap_metrics, reward_metrics, stage_findings, staleness_metrics
from .step_rewards import step_reward_metrics
from .stop import Preempted
from .unfinished import left_out

__all__ = ["run_loop", "run_step", "train_step"]


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
    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext,
    after: Callable[[int, Mapping[str, float] | None], None] = lambda step, scores: None,
    was_evaluated: Callable[[int], bool] = lambda step: True,
) -> tuple[int, Literal["done", "stopped"]]:
    """Run steps `start` to `run.max_steps`; returns the steps completed and whether they were all of them.

    A step is a pure function of its number and the weights, so a run that starts at a checkpoint continues exactly.
    With `run.max_staleness` = k, step s trains on samples of the weights before the k steps ahead of it, those of
    `start` at the oldest: steps `start` to `start` + k - 1 may have newer ones than they would have had.
    `save` is called at step boundaries only, and always before this returns.
    interrupting: context of what an urgent stop may interrupt, see `Stop.interrupting`: rollouts and evaluations, for
    the weights of the last boundary are still there.
    after: called with the steps done and the metrics of an evaluation after them, before they are saved.
    was_evaluated: whether the evaluation after `start` steps was made; one that a signal or a failure ended is made up.
    """
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    last, watch = plan.run.max_steps, RewardWatch(plan.run.max_steps)
    saved = start or None

    def prompts_of(step: int) -> list[Prompt]:
        # A round draws at most as many prompts as a step has.
        most = plan.data.dynamic_sampling_rounds * plan.data.prompts_per_step
        rows = order.step(step) + (order.spare(step, most) if most else ())
        return [prompts[row] for row in rows]

    def is_due(done: int) -> bool:
        return bool(held_out) and (done == last or (plan.eval.every > 0 and done % plan.eval.every == 0))

    def evaluated(done: int) -> dict[str, float]:
        with interrupting():
            queue.settle()
            return evaluate(parts, plan, held_out, step=done, events=events, trackers=trackers)

    # Of a critic and a fake score no version tells whether they have trained.
    has_others = any(stage.needs.critic or stage.needs.fake_score for stage in plan.trained)
    boundary = start
    try:
        with kept_images(plan), GroupQueue(parts, plan) as queue:
            if held_out and start == 0:
                evaluated(0)
            elif is_due(start) and not was_evaluated(start):
                after(start, evaluated(start))
            for step in range(start, last):
                events.check()
                if should_stop() or 0 < plan.run.stop_at <= step:
                    if saved != step:
                        save(step)
                    return step, "stopped"
                versions, done, phases = parts.versions, step + 1, Phases()
                states = {name: algorithm_state(algorithm) for name, algorithm in parts.algorithms.items()}
                try:
                    with kept_images(plan, step):
                        train_step(
                            queue,
                            prompts_of,
                            step=step,
                            end=min(last, plan.run.stop_at or last),
                            events=events,
                            trackers=trackers,
                            phases=phases,
                            watch=watch,
                            should_stop=should_stop,
                            interrupting=interrupting,
                        )
                except Exception:
                    is_before = parts.versions == versions and not (has_others and "train" in phases.seconds)
                    if is_before and step > start and saved != step:
                        for name, algorithm in parts.algorithms.items():
                            if states[name]:
                                # A step that took no update may have come as far as the end of it.
                                algorithm.load_state(states[name])
                        save(step)
                    raise
                boundary = done
                try:
                    after(done, evaluated(done) if is_due(done) else None)
                except Exception as error:
                    if saved != done:
                        try:
                            save(done)
                        except UniRLError as failure:
                            error.add_note(str(failure))
                    raise
                if done == last or (plan.run.save_every and done % plan.run.save_every == 0):
                    save(done)
                    saved = done
    except Preempted:
        if saved != boundary:
            save(boundary)
        return boundary, "stopped"
    return last, "done"


def run_step(
    parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int, events: EventStream, trackers: Trackers
) -> None:
    """One step outside of a run: nothing is in flight before or after it.

    prompts: those of the step, followed with dynamic sampling by those that may replace them.
    """
    with GroupQueue(parts, plan) as queue:
        train_step(queue, lambda _: prompts, step=step, end=step + 1, events=events, trackers=trackers)


def train_step(
    queue: GroupQueue,
    prompts_of: Callable[[int], Sequence[Prompt]],
    *,
    step: int,
    events: EventStream,
    trackers: Trackers,
    end: int,
    phases: Phases | None = None,
    watch: RewardWatch | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """One step: rollout, reward, advantage, train. Emits `step`.

    prompts_of: step -> its prompts, followed with dynamic sampling by those that may replace them.  end: the first step
    that is not run; with `run.max_staleness`, rollouts of steps before it are started ahead of training on this one.
    phases: takes the seconds of the step.  watch: of the rewards over the run so far.  should_stop: nothing is started
    ahead when it says so.  interrupting: see `run_loop`.
    """
    parts, plan = queue.parts, queue.plan
    began, phases, num_ready = time.perf_counter(), phases or Phases(), queue.num_ready
    with interrupting():
        if queue.last_step is None:
            queue.put(step, prompts_of(step), phases=phases)
        rollout = queue.get(step, phases=phases)
    ahead = min(step + 1 + plan.run.max_staleness, step + 1 if should_stop() else end)
    for number in range(max(step, queue.last_step or 0) + 1, ahead):
        queue.put(number, prompts_of(number), phases=phases)
    metrics = drawn_metrics(rollout, step=step + 1, events=events) | scout_metrics(rollout.scouts, rollout.tracks)
    metrics |= left_out(rollout.tracks, plan) | fallbacks(rollout.tracks, plan)
    metrics |= cut_texts(rollout.tracks, plan, parts.models)
    shows_samples = bool(plan.run.media_every) and step % plan.run.media_every == 0
    if shows_samples:
        trackers.samples("train", rollout, step=step)
    for stage in plan.trained:
        for name, text in watch.collapses(rollout.tracks[stage.name]) if watch else ():
            if plan.run.on_collapse == "fail":
                raise RunFailed(text)
            events.finding(text, step=step, once=f"{stage.name}: {name} collapsed")
        for *pair, text in watch.pairs(rollout.tracks[stage.name]) if watch else ():
            if plan.run.on_hacking == "fail":
                raise RunFailed(text)
            events.finding(text, step=step, once=f"{stage.name}: {pair}")
    found = {stage.name: staleness_metrics(plan, stage, rollout, version=parts.version(stage)) for stage in plan.stages}
    jobs: list[Job] = []
    try:
        for stage in plan.stages:
            job = _job(parts, plan, stage, rollout, step=step, phases=phases, metrics=found[stage.name])
            jobs += [job] if job else []
    finally:
        # Before training, and where there is nothing to train on: a failure is looked into with the samples.
        if shows_samples and plan.run.dir:
            save_samples(Path(plan.run.dir), rollout, {job.name: job.track for job in jobs}, step=step)
    with _engines_asleep(parts, plan, phases=phases):
        for learner in parts.backends:
            _train(parts, plan, learner, jobs, step=step, phases=phases, metrics=found)
    for stage in plan.stages:
        own, track = found[stage.name], rollout.tracks[stage.name]
        if stage.algorithm is not None:
            with attributed(f"algorithm {stage.algorithm.name!r}", phase="end of the step"):
                own |= end_algorithm_step(parts.algorithms[stage.name], own, samples=track.num_rows)
        cut_share = metrics.get(f"{plan.prefix(stage)}cut_texts", 0.0)
        for once, text in stage_findings(stage, own, samples=track.num_rows, cut_share=cut_share, step=step):
            events.finding(text, step=step + 1, once=once)
        metrics |= {plan.prefix(stage) + key: value for key, value in own.items()}
    train_s = phases.seconds.get("train", 0.0)
    if plan.run.reward_overlap_groups or plan.run.max_staleness:
        metrics |= overlap_metrics(rollout, train_s=train_s, step_s=time.perf_counter() - began)
    if plan.run.max_staleness:
        metrics["rollouts_waiting"] = float(num_ready)
    metrics |= track_bytes(rollout.tracks.values())
    if parts.speed is not None:
        metrics |= parts.speed.metrics({"generate": rollout.generate_s, "train": train_s})
    if parts.report is not None:
        report = parts.report()
        metrics |= report.metrics
        for text in report.findings:
            events.finding(text, step=step + 1)
    events.emit("step", step=step + 1, metrics=metrics, phases=phases.seconds, samples=rollout.num_samples)


def _job(
    parts: Parts,
    plan: Plan,
    stage: Stage,
    rollout: Rollout,
    *,
    step: int,
    phases: Phases,
    metrics: dict[str, float],
) -> Job | None:
    """Build a stage's training job; None if it is not trained, or has nothing to learn from.

    metrics: of the stage; takes those of its rewards and advantages.
    """
    track = rollout.tracks[stage.name]
    metrics |= reward_metrics(track)
    if stage.algorithm is None:
        return None
    if stage.needs.step_rewards:
        metrics |= step_reward_metrics(track)
    with phases("advantages", owner=f"algorithm {stage.algorithm.name!r}"):
        compared, result = parts.algorithms[stage.name].advantages(track)
    # Equal scores differ in their gradients, and other losses do not read them.
    reads_scores = stage.needs.reward in ("scalar", "group") and track.rewards is not None
    value = constant_reward(track) if reads_scores else None
    if value is not None and not has_advantages(compared, reward=value):
        if stage.advantage.constant_reward == "fail":
            raise RewardFailed(
                f"reward: all {track.num_rows} samples of step {step} got {value:g}: there is nothing to learn from. "
                "Look at the samples and the reward; advantage.constant_reward=skip leaves out such steps instead."
            )
        metrics["steps_skipped"] = 1.0
        return None
    metrics |= result
    return stage_job(parts, plan, compared)


def _train(
    parts: Parts,
    plan: Plan,
    learner: str,
    jobs: Sequence[Job],
    *,
    step: int,
    phases: Phases,
    metrics: Mapping[str, dict[str, float]],
) -> None:
    """Train a model on the jobs of its stages, then update EMA and lagged weights."""
    backend, chosen = parts.backends[learner], plan.learners[learner].backend
    assert chosen is not None
    own = [job for job in jobs if plan.stage(job.name).learner.name == learner]
    if own:
        names = " or ".join(repr(plan.stage(job.name).parts["algorithm"].name) for job in own)
        with phases("train", owner=f"backend {chosen.name!r} with algorithm {names}"):
            report = backend.train(own, progress=step / max(1, plan.run.max_steps - 1))
        steps = {"updates": report.num_updates, "updates_skipped": report.num_skipped}
        for job in own:
            metrics[job.name].update({**report.metrics[job.name], **steps})
    backend.end_rollout()


@contextmanager
def _engines_asleep(parts: Parts, plan: Plan, *, phases: Phases) -> Generator[None]:
    """Within the block, the engines of this process that can sleep do. Those of workers are put to sleep by their
    launcher, where they share a device with training."""
    stages = [] if parts.sync is not None else [stage for stage in plan.stages if stage.engine.has(Cap.SLEEP)]
    engines = list({id(parts.engines[stage.name]): parts.engines[stage.name] for stage in stages}.values())
    if not engines:
        yield
        return
    with phases("sleep", owner=engine_names(plan)):
        for engine in engines:
            engine.sleep()
    yield
    with phases("sleep", owner=engine_names(plan)):
        if parts.device_name:
            # Torch keeps what training has freed, and an engine is often another process.
            import torch

            torch.cuda.empty_cache()
        for engine in engines:
            engine.wake()
