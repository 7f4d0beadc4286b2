"""PPO over the tokens of a completion, with a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor
from unirl.algorithms.ppo.config import PpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Metric
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.losses import Surrogate
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.gae import token_rewards
from unirl.numerics.tokens.kl import token_kl
from unirl.numerics.tokens.policy import TokenWeights, old_log_prob_tokens, text_numbers, token_weights
from unirl.numerics.tokens.policy_loss import TokenPolicyLoss
from unirl.numerics.tokens.replay import per_token
from unirl.numerics.train.reference import with_reference
from unirl.numerics.train.values import value_losses, with_advantages_from_values

__all__ = ["Ppo", "build"]


def build(
    config: PpoConfig, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float], train: TrainConfig, seed: int
) -> Ppo:
    check_config(config, key="algorithm")
    return Ppo(config, train=train)


class Ppo(TokenPolicyLoss, Algorithm):
    """PPO, arXiv 1707.06347, equations 7 and 9, with the advantages of arXiv 1506.02438.

    Each token is an action: the reward comes at the last one, and a KL penalty to the reference policy may be
    subtracted at each (arXiv 1909.08593, equation 2).
    """

    trains_critic = True

    def __init__(self, config: PpoConfig, *, train: TrainConfig) -> None:
        super().__init__(config)
        self._config = config
        self._has_kl_reward = config.kl_in_reward and config.kl_coef > 0
        self._replays_anchor = train.old_log_probs != "engine"

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Nothing yet: token advantages are computed after the old-log-prob pass, from the critic's values."""
        return track, text_numbers(track)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Old log-probs, recomputed or the engine's; also the reference policy's if the reward needs them."""
        keeps_engine = self._config.tis != "none"
        track = old_log_prob_tokens(track, forward, replays=self._replays_anchor, keeps_engine=keeps_engine)
        return with_reference(track, forward) if self._has_kl_reward else track

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """Advantages by GAE, whitened over all tokens with weight on all ranks, and the value targets (returns)."""
        config, counted = self._config, self._token_weights(track).counted
        rewards, measured = self._rewards(track, counted > 0)
        result, metrics = with_advantages_from_values(
            track,
            rewards,
            counted,
            gamma=config.gamma,
            lam=config.gae_lambda,
            whitens=config.whiten_advantages,
            sum_over_ranks=sum_over_ranks,
        )
        return result, {**measured, **metrics}

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        weights = self._token_weights(track)
        return self.policy_weights(weights, weights)

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self._token_weights(track)
        advantages = torch.where(weights.counted > 0, per_token(track.text, "advantages"), 0.0)

        def surrogate(live: Tensor, old: Tensor, counted: Tensor) -> tuple[Surrogate, Tensor]:
            return self.clipped_tokens(live - old, advantages)

        return self.policy_losses(track, forward, surrogate, policy=weights, every=weights)

    def kl_weights(self, weights: TokenWeights) -> dict[str, Tensor]:
        return {} if self._config.kl_in_reward else super().kl_weights(weights)

    def kl_terms(
        self, track: Track, forward: Forward, *, log_probs: Tensor, old_log_probs: Tensor, weights: TokenWeights
    ) -> tuple[list[LossTerm], dict[str, Metric]]:
        """None if the KL penalty is in the reward, since the old-log-prob pass has measured it already."""
        if self._config.kl_in_reward:
            return [], {}
        return super().kl_terms(track, forward, log_probs=log_probs, old_log_probs=old_log_probs, weights=weights)

    def critic_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"value": self._token_weights(track).announced}

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        config, weights = self._config, self._token_weights(track)
        losses, metrics = value_losses(track, values, weights.counted, clip=config.clip_range_value)
        return Losses(terms=[weights.term("value", losses, scale=config.value_coef)], metrics=metrics)

    def _rewards(self, track: Track, valid: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """[n, S], the reward of each token; and the KL that was subtracted, for the log."""
        total = track.rewards
        assert total is not None
        if not self._has_kl_reward:
            return token_rewards(total, valid), {}
        old, reference = (
            torch.where(valid, per_token(track.text, name), 0.0) for name in ("log_probs", "reference_log_probs")
        )
        kl = token_kl(old, reference, old_log_probs=old, config=self._config)
        counted = self._token_weights(track).counted
        return token_rewards(total, valid, kl=kl, kl_coefficient=self.kl_coef), {"kl": mean_over(kl, counted)}

    def _token_weights(self, track: Track) -> TokenWeights:
        return token_weights(
            track,
            cast(AggregationMode, self._config.aggregation),
            horizon=self._config.horizon,
            truncated=cast("Literal['keep', 'mask']", self._config.truncated),
        )
