"""PPO over the denoise steps of a flow model, with a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from unirl.algorithms.ppo.config import FlowPpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Metric, Replayed
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.losses import clipped_surrogate, gaussian_kl
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.tokens.gae import token_rewards
from unirl.numerics.train.actions import per_action
from unirl.numerics.train.steps import StepLosses, old_log_prob_steps, step_counts
from unirl.numerics.train.values import value_losses, with_advantages_from_values

__all__ = ["FlowPpo", "build"]


def build(
    config: FlowPpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> FlowPpo:
    check_config(config, key="algorithm")
    return FlowPpo(config, train=train)


class FlowPpo(StepLosses, AdaptiveKl, Algorithm):
    """PPO, arXiv 1707.06347, equations 7 and 9, with the advantages of arXiv 1506.02438.

    Denoising as a decision process (DDPO, arXiv 2305.13301, section 4.2): each scored step is an action, whose state is
    the latent, the prompt and the noise level, and the reward comes at the last one.
    """

    trains_critic = True

    def __init__(self, config: FlowPpoConfig, *, train: TrainConfig) -> None:
        super().__init__(config)
        self._config = config
        self._replays_anchor = train.old_log_probs != "engine"

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Nothing yet: they are computed after the old-log-prob pass, from the critic's values."""
        return track, {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return old_log_prob_steps(track, forward, replays=self._replays_anchor)

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """Advantages by GAE, whitened over the scored steps of all ranks, and the value targets (returns)."""
        config, counted = self._config, step_counts(track)
        assert track.rewards is not None
        return with_advantages_from_values(
            track,
            token_rewards(track.rewards, counted > 0),
            counted,
            gamma=config.gamma,
            lam=config.gae_lambda,
            whitens=config.whiten_advantages,
            sum_over_ranks=sum_over_ranks,
        )

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        counted = step_counts(track)
        return {"policy": counted, "kl": counted} if self._config.kl_coef else {"policy": counted}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        counted = step_counts(track)
        new = forward(track)
        assert isinstance(new, Replayed)
        log_ratio = new.log_probs - per_action(track, "log_probs")
        low, high = self._config.clip_bounds
        result = clipped_surrogate(log_ratio, per_action(track, "advantages"), clip_low=low, clip_high=high)
        terms = [LossTerm(name="policy", values=result.loss, weights=counted)]
        metrics = ratio_metrics(result.ratio, result.clipped, log_ratio.detach(), counted)
        if self._config.kl_coef:
            with torch.no_grad():
                reference = forward(track, policy="reference")
                assert isinstance(reference, Replayed)
            kl = gaussian_kl(new.means, reference.means, new.std)
            terms.append(LossTerm(name="kl", values=kl, weights=counted, scale=self.kl_coef))
            metrics["kl"] = mean_over(kl, counted)
        return Losses(terms=terms, metrics=metrics)

    def critic_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"value": step_counts(track)}

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        counted = step_counts(track)
        losses, metrics = value_losses(track, values, counted, clip=self._config.clip_range_value)
        term = LossTerm(name="value", values=losses, weights=counted, scale=self._config.value_coef)
        return Losses(terms=[term], metrics=metrics)
