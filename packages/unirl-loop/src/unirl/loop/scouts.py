"""Scouts: many cheap samples of each prompt, whose rewards choose the few that are drawn exactly and trained on.

Noise is a function of the sample's id and the step, so a scout and the exact sample of its id start from the same x_T
and get the same noise in their first steps: that is why the one predicts the other. Hence scouts keep the kernel and
its noise, and take fewer steps; without noise they predict half as well. They have no trajectory and no log-probs.

Source: Sol-RL, arXiv 2604.06916.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from unirl.core.errors import RewardFailed
from unirl.numerics.loss.rank_values import rank_values
from unirl.numerics.train.track_advantages import best_and_worst

from .requests import build_request, sampling_errors

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan
    from unirl.core.types.data import Prompt
    from unirl.core.types.request import Request
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.core.types.track import Track

    from .parts import Parts

__all__ = ["chosen_by", "known_rewards", "scout_metrics", "scout_requests"]


def scout_requests(
    parts: Parts, plan: Plan, prompts: Sequence[Prompt], *, step: int, versions: Mapping[str, int] | None = None
) -> dict[str, Request]:
    """The request of the scouts of a step, under the only stage; like `step_requests`."""
    stage, scouts = plan.only, plan.data.scouts
    sampling = cast("LatentSamplingConfig", stage.sampling)
    with sampling_errors(plan, stage):
        request = build_request(
            prompts,
            track=stage.name,
            sampling=dataclasses.replace(sampling, num_inference_steps=scouts.num_inference_steps),
            samples_per_prompt=scouts.samples_per_prompt,
            model=parts.models[stage.learner.name],
            model_track=stage.track,
            takes=stage.takes,
            medium=stage.medium,
            trajectory="none",
            seed=plan.run.seed,
            rollout=step,
            policy_version=parts.version(stage) if versions is None else versions[stage.name],
        )
    return {stage.name: request}


def chosen_by(scouts: Track, *, count: int) -> frozenset[str]:
    """Ids of the samples of each group to draw exactly: the best half by the scouts' rewards, and the worst.

    scouts: scored.  count: samples of each group; the odd one is among the best. Among equal rewards the ids decide.
    Raises RewardFailed for a group with fewer scored scouts.
    """
    ranked = dataclasses.replace(scouts, advantages=scouts.rewards)
    chosen = set(best_and_worst(ranked, best=count - count // 2, worst=count // 2))
    for group, rows in scouts.groups().items():
        if len(chosen.intersection(rows)) < count:
            raise RewardFailed(
                f"data.scouts: {len(chosen.intersection(rows))} of the {len(rows)} scouts of group {group!r} have a "
                f"score of every reward, expected {count} or more, the samples to draw exactly. Look at the replies of "
                "the reward's model or service, or draw more scouts."
            )
    return frozenset(scouts.sample_ids[row] for row in chosen)


def known_rewards(scouts: Track) -> dict[str, float]:
    """Sample id -> reward, for scouts that have one."""
    assert scouts.rewards is not None
    rewards = zip(scouts.sample_ids, cast("list[float]", scouts.rewards.tolist()), strict=True)
    return {sample: reward for sample, reward in rewards if not np.isnan(reward)}


def scout_metrics(scouts: Mapping[str, float], tracks: Mapping[str, Track]) -> dict[str, float]:
    """`scouts/reward_mean`, over all scouts, and `scouts/rank_correlation`: Spearman's correlation of the rewards of
    exact samples with those of their scouts, the mean over groups in which both vary; left out where there is none.

    scouts: sample id -> reward; empty without scouts.  tracks: of the rollout, the exact samples.
    """
    if not scouts:
        return {}
    (track,) = tracks.values()
    assert track.rewards is not None
    exact = cast("list[float]", track.rewards.tolist())
    correlations: list[float] = []
    for rows in track.groups().values():
        scored = [row for row in rows if not np.isnan(exact[row])]
        pairs = np.array([(scouts[track.sample_ids[row]], exact[row]) for row in scored])
        if len(scored) > 1 and (pairs != pairs[0]).any(axis=0).all():
            one = np.zeros(len(scored), dtype=np.int64)
            # Win rates are mean ranks on another scale, so their correlation is that of the ranks.
            cheap, full = (rank_values(column, one, kind="win-rate") for column in pairs.T)
            correlations.append(float(np.corrcoef(cheap, full)[0, 1]))
    result = {"scouts/reward_mean": float(np.mean(list(scouts.values())))}
    return result | ({"scouts/rank_correlation": float(np.mean(correlations))} if correlations else {})
