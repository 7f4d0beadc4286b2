"""The loop: rollout, reward, advantage, train, weight sync. Everything it calls is a role."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

from unirl.core.data.prompts import PromptOrder, StepPrompts
from unirl.core.errors import RewardFailed, RunFailed
from unirl.core.match.mismatch_bounds import mismatch_bounds, train_settings
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import Job
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.data import Prompt
from unirl.core.types.track import Track

from .ahead import RolloutsAhead
from .algorithm_state import algorithm_state, end_algorithm_step
from .evaluation import evaluate
from .generation import kept_images
from .parts import Parts, attributed, sync_weights
from .requests import step_requests
from .reward_watch import RewardWatch
from .scoring import constant_reward, known, mean_parts
from .streaming import MadeRollout, Phases, RolloutMaker

__all__ = ["Phases", "run_loop", "run_step"]


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
    """Run steps `start` to `run.max_steps`; returns the steps completed and whether they were all of them.

    A step is a pure function of its number and the weights, so a run that starts at a checkpoint goes on exactly. With
    `run.max_staleness` = k, step s trains on samples of the weights before the k steps ahead of it, those of `start` at
    the oldest: steps `start` to `start` + k - 1 may have newer ones than they would have had.
    `save` is called at step boundaries only, and always before this returns.
    """
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    last, saved, watch = plan.run.max_steps, start, RewardWatch(plan.run.max_steps)

    def chosen(step: int) -> StepPrompts:
        spare = order.spare(step) if plan.data.dynamic_sampling_rounds else ()
        return StepPrompts(chosen=[prompts[row] for row in order.step(step)], spare=[prompts[row] for row in spare])

    def stops_at(step: int) -> bool:
        return should_stop() or 0 < plan.run.stop_at <= step

    def chosen_from(step: int) -> list[StepPrompts]:
        """Prompts of the steps that may be begun ahead, from this one on."""
        end = min(step + plan.run.max_staleness, last, plan.run.stop_at or last)
        return [] if should_stop() else [chosen(number) for number in range(step, end)]

    with kept_images(plan), RolloutsAhead(parts, plan) if plan.run.max_staleness else nullcontext() as ahead:
        if held_out and start == 0:
            evaluate(parts, plan, held_out, step=0, events=events, trackers=trackers)
        for step in range(start, last):
            if stops_at(step):
                if saved != step:
                    save(step)
                return step, "stopped"
            versions, done = parts.versions, step + 1
            states = {name: algorithm_state(algorithm) for name, algorithm in parts.algorithms.items()}
            try:
                prompts_now = chosen(step)
                with kept_images(plan, step):
                    run_step(
                        parts,
                        plan,
                        prompts_now.chosen,
                        spare=prompts_now.spare,
                        step=step,
                        events=events,
                        trackers=trackers,
                        ahead=ahead,
                        following=chosen_from(done),
                        watch=watch,
                    )
            except Exception:
                if parts.versions == versions and saved != step:
                    for name, algorithm in parts.algorithms.items():
                        if states[name]:
                            # A step that took no update may have come as far as the end of it.
                            algorithm.load_state(states[name])
                    save(step)
                raise
            if held_out and (done == last or (plan.eval.every and done % plan.eval.every == 0)):
                if ahead:
                    ahead.settle()
                evaluate(parts, plan, held_out, step=done, events=events, trackers=trackers)
            if done == last or (plan.run.save_every and done % plan.run.save_every == 0):
                save(done)
                saved = done
    return last, "done"


def run_step(
    parts: Parts,
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    step: int,
    events: EventStream,
    trackers: Trackers,
    spare: Sequence[Prompt] = (),
    ahead: RolloutsAhead | None = None,
    following: Sequence[StepPrompts] = (),
    watch: RewardWatch | None = None,
) -> None:
    """One round: rollout, reward, advantage, train. Emits `step`.

    spare: prompts that may be drawn in place of those whose samples all got one reward, see
    `data.dynamic_sampling_rounds`. ahead: who makes the rollouts while others are trained on.  following: prompts of
    the next steps, in their order, whose rollouts are begun, unless they were before, ahead of training on this one.
    watch: of the run so far, which is told of this step.
    """
    began, phases = time.perf_counter(), Phases()
    waiting = ahead.num_waiting if ahead else 0
    taken = StepPrompts(chosen=prompts, spare=spare)
    made = ahead.take(step, taken, phases=phases) if ahead else _make(parts, plan, taken, step=step, phases=phases)
    if ahead:
        ahead.begin_after(step, following, phases=phases)
    metrics: dict[str, float] = _drawn(made, step=step + 1, events=events)
    if plan.run.media_every and step % plan.run.media_every == 0:
        trackers.samples("train", made.rollout, step=step)
    found = {stage.name: _staleness(plan, stage, made, version=parts.version(stage)) for stage in plan.stages}
    jobs = [
        _job(parts, plan, stage, made.rollout.tracks, step=step, phases=phases, metrics=found) for stage in plan.stages
    ]
    for name in parts.backends:
        _train(parts, plan, name, [job for job in jobs if job is not None], step=step, phases=phases, metrics=found)
    for stage in plan.stages:
        own = found[stage.name]
        if own.get("steps_skipped"):
            text = (
                f"reward: all {made.rollout.tracks[stage.name].num_rows} samples of step {step} got "
                f"{own['reward_mean']:g}, so there was nothing to learn from and the step made no update. Look at the "
                "samples and the reward; advantage.constant_reward=fail stops the run instead."
            )
            events.finding(text, step=step + 1, once="constant reward")
        for *pair, text in watch.pairs(made.rollout.tracks[stage.name]) if watch else ():
            events.finding(text, step=step + 1, once=f"{stage.name}: {pair}")
        if stage.algorithm is not None:
            algorithm, samples = parts.algorithms[stage.name], made.rollout.tracks[stage.name].num_rows
            with attributed(f"algorithm {stage.algorithm.name!r}", phase="end of the step"):
                own |= end_algorithm_step(algorithm, own, samples=samples)
            _watch_mismatch(stage, own, step=step + 1, events=events)
        metrics |= {plan.prefix(stage) + key: value for key, value in own.items()}
    if plan.run.reward_overlap_groups or plan.run.max_staleness:
        metrics |= _overlap(made, train_s=phases.seconds.get("train", 0.0), step_s=time.perf_counter() - began)
    if ahead:
        metrics["rollouts_waiting"] = float(waiting)
    if parts.noted is not None:
        noted = parts.noted()
        metrics |= noted.metrics
        for text in noted.findings:
            events.finding(text, step=step + 1)
    events.emit("step", step=step + 1, metrics=metrics, phases=phases.seconds, samples=made.rollout.num_samples)


def _make(parts: Parts, plan: Plan, prompts: StepPrompts, *, step: int, phases: Phases) -> MadeRollout:
    """The rollout of a step, with the weights that train now."""
    with phases("sync", owner=_engines(plan)):
        sync_weights(parts, plan)
    with phases("request", owner="the sampling of a stage"):
        requests = step_requests(parts, plan, prompts.chosen, step=step)
    return RolloutMaker(parts, plan, requests, phases=phases, spare=prompts.spare).make()


def _engines(plan: Plan) -> str:
    return " or ".join(dict.fromkeys(f"engine {stage.engine.name!r}" for stage in plan.stages))


def _job(
    parts: Parts,
    plan: Plan,
    stage: Stage,
    tracks: Mapping[str, Track],
    *,
    step: int,
    phases: Phases,
    metrics: Mapping[str, dict[str, float]],
) -> Job | None:
    """What a stage trains on: its track with advantages; None where there is nothing to learn, or nobody who does.

    metrics: of each stage, takes the numbers of this one.
    """
    track, own = tracks[stage.name], metrics[stage.name]
    own |= _reward_metrics(track)
    if stage.algorithm is None:
        return None
    # Equal scores differ in their gradients.
    has_gradient = stage.needs.reward == "differentiable"
    value = None if track.rewards is None or has_gradient else constant_reward(track)
    if value is not None:
        if stage.advantage.constant_reward == "fail":
            raise RewardFailed(
                f"reward: all {track.num_rows} samples of step {step} got {value:g}: there is nothing to learn from. "
                "Look at the samples and the reward; advantage.constant_reward=skip leaves out such steps instead."
            )
        own["steps_skipped"] = 1.0
        return None
    with phases("advantages", owner=f"algorithm {stage.algorithm.name!r}"):
        track, result = parts.algorithms[stage.name].advantages(track)
    own |= result
    return Job(
        track=track,
        algorithm=parts.algorithms[stage.name],
        name=stage.name,
        weight=stage.settings.weight,
        # A single stage has the settings that its backend was built with.
        train=train_settings(stage) if len(plan.trained) > 1 else None,
        reference=parts.models[stage.teacher.name] if stage.teacher else None,
        reference_guidance=stage.settings.reference_guidance,
    )


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
    """Train a model on the jobs of its stages, and let what follows rollouts move."""
    backend, chosen = parts.backends[learner], plan.learners[learner].backend
    assert chosen is not None
    own = [job for job in jobs if plan.stage(job.name).learner.name == learner]
    if own:
        names = " or ".join(repr(plan.stage(job.name).parts["algorithm"].name) for job in own)
        with phases("train", owner=f"backend {chosen.name!r} with algorithm {names}"):
            report = backend.train(own, progress=step / max(1, plan.run.max_steps - 1))
        common = {**report.metrics, "updates": report.num_updates, "updates_skipped": report.num_skipped}
        for job in own:
            metrics[job.name].update(_of_job(common, job, own))
    backend.end_rollout()


def _of_job(metrics: Mapping[str, float], job: Job, jobs: Sequence[Job]) -> Mapping[str, float]:
    """The metrics of one job and those of the steps that it shares, without its name."""
    if len(jobs) == 1:
        return metrics
    named = tuple(f"{each.name}/" for each in jobs)
    mine = f"{job.name}/"
    return {
        key.removeprefix(mine): value
        for key, value in metrics.items()
        if key.startswith(mine) or not key.startswith(named)
    }


def _reward_metrics(track: Track) -> dict[str, float]:
    if track.rewards is None:
        return {}
    rewards = known(track.rewards)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        **mean_parts(track),
    }


def _staleness(plan: Plan, stage: Stage, made: MadeRollout, *, version: int) -> dict[str, float]:
    """How many updates the weights that made the samples are behind `version`, the newest of the policy that samples.

    Raises RunFailed when that is more than `run.max_staleness` rounds of updates. The numbers are for runs ahead.
    """
    track = made.rollout.tracks[stage.name]
    # The stages of a model that train take the same updates; others sample its weights as well.
    updates = [other.train.updates_per_step for other in plan.trained if other.learner.name == stage.learner.name]
    bound = plan.run.max_staleness * max(updates, default=0)
    ages: list[int] = []
    for row in (row for row in range(track.num_rows) if float(track.sample_weights[row])):
        made_with = track.policy_version[row]
        ages.append(version - made_with)
        if not 0 <= ages[-1] <= bound:
            raise RunFailed(
                f"run.max_staleness: sample {track.sample_ids[row]!r} was made with version {made_with} of the "
                f"weights, and version {version} trains; with run.max_staleness={plan.run.max_staleness} a sample "
                f"may be {bound} versions behind."
            )
    if not plan.run.max_staleness or not ages:
        return {}
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}


def _drawn(made: MadeRollout, *, step: int, events: EventStream) -> dict[str, float]:
    """How many groups it took to fill the step; says once that there were too few."""
    if made.drawn is None:
        return {}
    if made.drawn.num_missing:
        text = (
            f"data.dynamic_sampling_rounds: the step trains on {made.drawn.num_missing} groups fewer than "
            f"data.prompts_per_step; {made.drawn.num_without_spread} of the {made.drawn.num_groups} that were drawn "
            "had one reward for all samples."
        )
        events.finding(text, step=step, once="refill")
    return {
        "groups_drawn": float(made.drawn.num_groups),
        "groups_without_spread": float(made.drawn.num_without_spread),
    }


def _overlap(made: MadeRollout, *, train_s: float, step_s: float) -> dict[str, float]:
    """What doing things at once gave. `overlap` is the step over its longest phase: 1 is ideal."""
    longest = max(made.generate_s, made.score_s, train_s)
    return {
        "generate_s": made.generate_s,
        "score_s": made.score_s,
        "train_s": train_s,
        "overlap": step_s / longest,
        "generate_utilisation": made.generate_s / step_s,
        "reward_latency_mean_s": sum(made.latencies_s) / len(made.latencies_s),
        "reward_latency_max_s": max(made.latencies_s),
        "reward_queue_max": float(made.queue_max),
    }


def _watch_mismatch(stage: Stage, metrics: Mapping[str, float], *, step: int, events: EventStream) -> None:
    """Say once when the engine's log-probs are off by more than half of what is allowed; past it the stack stops."""
    bounds = mismatch_bounds(stage)
    for key, gap in metrics.items():
        for ending, bound in (("logp_mismatch_max", bounds.largest), ("logp_mismatch_mean", bounds.mean)):
            if key.endswith(ending) and bound is not None and gap > bound / 2:
                text = (
                    f"{key}: log-probs of engine {stage.engine.name!r} differ by {gap:.2e}; the run stops at "
                    f"{bound:.2e} (train.{ending})."
                )
                events.finding(text, step=step, once=ending)
