"""BranchGRPO: the clipped surrogate over the steps of a tree of samples, each step with its own advantage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor
from unirl.algorithms.branch_grpo.config import BranchGrpoConfig
from unirl.algorithms.branch_grpo.tree import path_advantages, without_steps
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Replayed
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.losses import clipped_surrogate
from unirl.numerics.loss.policy_metrics import ratio_metrics
from unirl.numerics.train.steps import StepLosses, old_log_prob_steps, step_counts
from unirl.numerics.train.track_advantages import (
    advantages_of,
    chosen_and_clipped,
    track_advantages,
    whole_groups,
)

__all__ = ["BranchGrpo", "build"]


def build(
    config: BranchGrpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> BranchGrpo:
    check_config(config, key="algorithm")
    return BranchGrpo(config, advantage=advantage, reward_weights=reward_weights, train=train)


class BranchGrpo(StepLosses, Algorithm):
    """BranchGRPO, arXiv 2509.06040.

    The samples of a group are the leaves of a tree. A step that several samples share has one advantage: that of the
    reward of the path that it leads to, normalised over the distinct paths of its depth.

    A shared step counts once for each sample below it. At each of the S depths the mean over the N samples is then the
    mean over the paths of the tree, which have equally many leaves, and the gradient of the loss is the sum over depths
    of E[A grad log p] / S, the policy gradient. Counting each distinct path once instead would weigh a depth by its
    number of paths, so that late steps count more than early ones.
    """

    def __init__(
        self,
        config: BranchGrpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        train: TrainConfig,
    ) -> None:
        self._config = config
        self._advantage = advantage
        self._reward_weights = reward_weights
        self._replays = train.old_log_probs != "engine"

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        config, weights = self._config, self._reward_weights
        every = whole_groups(self._advantage)
        # Of the samples, as Flow-GRPO has them: to choose samples by, and for who asks for one number a sample.
        track, numbers = track_advantages(track, every, reward_weights=weights)
        by_step = path_advantages(track, every, reward_weights=weights, path_weight=config.path_weight)
        track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, advantages=by_step))
        if config.skip_steps:
            track = without_steps(track, config.skip_steps)
        low = config.keep_leaves // 2
        pruned = dataclasses.replace(self._advantage, keep_best=config.keep_leaves - low, keep_worst=low)
        track, chosen = chosen_and_clipped(track, pruned if config.keep_leaves else self._advantage)
        return track, numbers | chosen

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Store the old log-probs: recomputed ones, exactly as in the update, or the engine's."""
        return old_log_prob_steps(track, forward, replays=self._replays)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"policy": step_counts(track)}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self.loss_weights(track)["policy"]
        new, old = forward(track), track.latent.log_probs
        assert isinstance(new, Replayed) and old is not None
        log_ratio = new.log_probs - old
        surrogate = clipped_surrogate(
            log_ratio,
            advantages_of(track),
            clip_low=config.clip_range,
            clip_high=config.clip_range if config.clip_range_high is None else config.clip_range_high,
        )
        metrics = ratio_metrics(surrogate.ratio, surrogate.clipped, log_ratio.detach(), weights)
        return Losses(terms=[LossTerm(name="policy", values=surrogate.loss, weights=weights)], metrics=metrics)
