"""Metrics of a step, and findings in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unirl.core.errors import RunFailed
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.observe.events import EventStream
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.rollout import Rollout
from unirl.core.types.track import Track

from .scored_groups import ScoredGroups
from .scoring import agreements, known, mean_parts

__all__ = ["drawn_metrics", "overlap_metrics", "reward_metrics", "stage_findings", "staleness_metrics"]


def reward_metrics(track: Track) -> dict[str, float]:
    if track.rewards is None:
        return {}
    rewards = known(track.rewards)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        **mean_parts(track),
        **agreements(track),
    }


def staleness_metrics(plan: Plan, stage: Stage, rollout: Rollout, *, version: int) -> dict[str, float]:
    """How many updates the weights that made the samples are behind `version`, the newest of the policy that samples.

    Raises RunFailed when that is more than `run.max_staleness` rounds of updates. The numbers are for runs ahead.
    """
    track = rollout.tracks[stage.name]
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


def drawn_metrics(groups: ScoredGroups, *, step: int, events: EventStream) -> dict[str, float]:
    """Numbers of groups that dynamic sampling drew; says once that there were too few useful ones."""
    drawn = groups.drawn
    if drawn is None:
        return {}
    if drawn.num_missing:
        text = (
            f"data.dynamic_sampling_rounds: the step trains on {drawn.num_missing} groups fewer than "
            f"data.prompts_per_step; {drawn.num_without_spread} of the {drawn.num_groups} that were drawn had one "
            "reward for all samples."
        )
        events.finding(text, step=step, once="refill")
    return {
        "groups_drawn": float(drawn.num_groups),
        "groups_without_spread": float(drawn.num_without_spread),
    }


def overlap_metrics(groups: ScoredGroups, *, train_s: float, step_s: float) -> dict[str, float]:
    """How much ran at the same time. `overlap` is the step over its longest phase: 1 is ideal."""
    return {
        "generate_s": groups.generate_s,
        "score_s": groups.score_s,
        "train_s": train_s,
        "overlap": step_s / max(groups.generate_s, groups.score_s, train_s),
        "generate_utilisation": groups.generate_s / step_s,
        "reward_latency_mean_s": sum(groups.latencies_s) / len(groups.latencies_s),
        "reward_latency_max_s": max(groups.latencies_s),
        "reward_queue_max": float(groups.most_unscored),
    }


def stage_findings(
    stage: Stage, metrics: Mapping[str, float], *, samples: int, cut_share: float, step: int
) -> Iterator[tuple[str, str]]:
    """Findings in a stage's metrics of a step: a key, under which it is told once, and the text.

    cut_share: of the texts that its model reads.
    """
    if metrics.get("steps_skipped"):
        yield (
            f"{stage.name}: constant reward",
            f"reward: all {samples} samples of step {step} got {metrics['reward_mean']:g}, so there was nothing to "
            "learn from and the step made no update. Look at the samples and the reward; "
            "advantage.constant_reward=fail stops the run instead.",
        )
    if metrics.get("updates_skipped"):
        yield (
            f"{stage.name}: skipped",
            f"{stage.name}: {metrics['updates_skipped']} updates of the step were left out, because a gradient was not "
            "finite; the weights are as before them. Often this is a learning rate that is too high.",
        )
    if cut_share:
        yield (
            f"{stage.name}: cut texts",
            f"sampling.{stage.name}.max_sequence_length: {cut_share:.0%} of the texts of stage {stage.parent!r} are "
            f"longer than model {stage.model.name!r} reads; their ends have no effect. Raise it, or lower "
            f"sampling.{stage.parent}.max_new_tokens.",
        )
    if stage.algorithm is None:
        return
    train = train_settings(stage)
    for key, gap in metrics.items():
        for ending in ("logp_mismatch_max", "logp_mismatch_mean"):
            bound: float | None = getattr(train, ending)
            # Above the bound the train stack raises.
            if key.endswith(ending) and bound is not None and gap > bound / 2:
                yield (
                    f"{stage.name}: {ending}",
                    f"{key}: log-probs of engine {stage.engine.name!r} differ by {gap:.2e}; the run stops at "
                    f"{bound:.2e} (train.{ending}).",
                )
