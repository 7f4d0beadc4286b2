"""DRPO and SPO over the tokens of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor
from unirl.algorithms.drpo.config import DrpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, ReplayedTokens
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.tokens.kl import TokenKl
from unirl.numerics.tokens.losses import drpo_loss
from unirl.numerics.tokens.policy import TokenWeights, old_log_prob_tokens, text_numbers, token_weights
from unirl.numerics.tokens.replay import per_token
from unirl.numerics.train.track_advantages import track_advantages

__all__ = ["Drpo", "build"]


def build(
    config: DrpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Drpo:
    check_config(config, key="algorithm")
    return Drpo(config, advantage=advantage, reward_weights=reward_weights, train=train)


class Drpo(TokenKl, Algorithm):
    """DRPO, arXiv 2606.09821: -A r + |A| pi_old (r - 1)^2 / (2 delta) for each token; SPO without the pi_old.

    The penalty is smooth where a clip zeroes the gradient; at ratio 1 both give the plain policy gradient.
    """

    def __init__(
        self,
        config: DrpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        train: TrainConfig,
    ) -> None:
        super().__init__(config)
        self._config = config
        self._advantage = advantage
        self._reward_weights = reward_weights
        self._replays_anchor = train.old_log_probs != "engine"
        self._horizon = config.horizon if config.aggregation == "seq-mean-token-sum-norm" else None

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track = self.with_kl_weights(track, reward_weights=self._reward_weights)
        result, numbers = track_advantages(track, self._advantage, reward_weights=self._reward_weights)
        return result, {**text_numbers(track), **numbers}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Old log-probs: recomputed exactly as in the update, or the engine's unchanged."""
        return old_log_prob_tokens(track, forward, replays=self._replays_anchor)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        weights = self._token_weights(track)
        return {"policy": weights.announced, **self.kl_weights(weights)}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self._token_weights(track)
        new = forward(track)
        assert isinstance(new, ReplayedTokens)
        # Values at weight 0 may be NaN, and must not reach an exponential.
        is_counted = weights.counted > 0
        old = torch.where(is_counted, per_token(track.text, "log_probs"), 0.0)
        live = torch.where(is_counted, new.log_probs, 0.0)
        log_ratio = live - old
        advantages = track.advantages
        assert advantages is not None
        result = drpo_loss(
            log_ratio, advantages, old_log_probs=old if config.weighs_by_old else None, delta=config.delta
        )
        pull = result.loss.detach() + advantages[:, None] * result.ratio
        metrics = {
            **ratio_metrics(result.ratio, result.clipped, log_ratio.detach(), weights.counted),
            "pull": mean_over(pull, weights.counted),
        }
        if new.entropy is not None:
            metrics["entropy"] = mean_over(new.entropy, weights.counted)
        divergence, measured = self.kl_terms(track, forward, log_probs=live, old_log_probs=old, weights=weights)
        return Losses(terms=[weights.term("policy", result.loss), *divergence], metrics={**metrics, **measured})

    def _token_weights(self, track: Track) -> TokenWeights:
        return token_weights(
            track,
            cast(AggregationMode, self._config.aggregation),
            horizon=self._horizon,
            truncated=cast("Literal['keep', 'mask']", self._config.truncated),
        )
