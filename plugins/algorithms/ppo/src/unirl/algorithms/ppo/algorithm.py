"""PPO over the tokens of a completion, with a critic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor
from unirl.algorithms.ppo.config import PpoConfig
from unirl.core.roles import Forward, Losses, LossTerm, Metric
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.losses import Surrogate
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.gae import gae, token_rewards
from unirl.numerics.tokens.kl import token_kl
from unirl.numerics.tokens.policy import TokenWeights, old_log_prob_tokens, text_numbers, token_weights
from unirl.numerics.tokens.policy_loss import TokenPolicyLoss
from unirl.numerics.tokens.replay import per_sample, per_token
from unirl.numerics.tokens.value_loss import clipped_value_loss, explained_by_moments
from unirl.numerics.tokens.whitening import token_moments, whiten
from unirl.numerics.train.reference import with_reference

__all__ = ["Ppo", "build"]


def build(
    config: PpoConfig, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float], train: TrainConfig, seed: int
) -> Ppo:
    check_config(config, key="algorithm")
    return Ppo(config, train=train)


class Ppo(TokenPolicyLoss):
    """PPO, arXiv 1707.06347, equations 7 and 9, with the advantages of arXiv 1506.02438. Fits `CriticAlgorithm`.

    Each token is an action: the reward comes at the last one, and a KL penalty to the reference policy may be
    subtracted at each (arXiv 1909.08593, equation 2).
    """

    def __init__(self, config: PpoConfig, *, train: TrainConfig) -> None:
        super().__init__(config)
        self._config = config
        self._has_kl_reward = config.kl_in_reward and config.kl_coef > 0
        self._replays_anchor = train.old_log_probs == "replay"

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
        config, segment, counted = self._config, track.text, self._token_weights(track).counted
        valid = counted > 0
        values = torch.where(valid, per_token(segment, "values"), 0.0)
        rewards, metrics = self._rewards(track, valid)
        result = gae(rewards, values, valid, gamma=config.gamma, lam=config.gae_lambda)
        # An advantage is the critic's error: the return less the value.
        moments = sum_over_ranks(
            torch.stack([token_moments(x, valid).cpu() for x in (result.advantages, result.returns)])
        )
        explained = explained_by_moments(errors=moments[0], returns=moments[1])
        advantages = result.advantages
        if config.whiten_advantages:
            advantages = whiten(advantages, valid, moments=moments[0])
        metrics |= {
            "advantage_abs_mean": mean_over(advantages.abs(), counted),
            "returns_mean": mean_over(result.returns, counted),
            "values_mean": mean_over(values, counted),
            "explained_variance": Metric(total=explained or 0.0, weight=float(explained is not None)),
        }
        segment = dataclasses.replace(
            segment,
            advantages=per_sample(advantages, segment),
            returns=per_sample(result.returns, segment),
        )
        return dataclasses.replace(track, segment=segment), metrics

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
        is_counted = weights.counted > 0
        now, before, returns = (
            torch.where(is_counted, x, 0.0)
            for x in (values, per_token(track.text, "values"), per_token(track.text, "returns"))
        )
        clip = math.inf if config.clip_range_value is None else config.clip_range_value
        result = clipped_value_loss(now, before, returns, clip=clip)
        metrics = {
            "value_loss": mean_over(result.loss, weights.counted),
            "value_clip_fraction": mean_over(result.clipped.float(), weights.counted),
        }
        return Losses(terms=[weights.term("value", result.loss, scale=config.value_coef)], metrics=metrics)

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
