"""DPOK: the clipped policy gradient over denoise steps, near the reference policy's velocity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from unirl.algorithms.dpok.config import DpokConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Metric, Replayed
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.losses import bounded_ratio, expand_leading
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.tokens.gae import token_rewards
from unirl.numerics.train.actions import per_action
from unirl.numerics.train.steps import StepLosses, old_log_prob_steps, step_counts, velocity_shift_squared
from unirl.numerics.train.track_advantages import advantages_of, track_advantages
from unirl.numerics.train.values import value_losses, with_advantages_from_values

__all__ = ["CriticDpok", "Dpok", "build"]


def build(
    config: DpokConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Dpok:
    check_config(config, key="algorithm")
    kind = CriticDpok if config.critic else Dpok
    return kind(config, advantage=advantage, reward_weights=reward_weights, train=train)


class Dpok(StepLosses, AdaptiveKl, Algorithm):
    """DPOK, arXiv 2305.16381, algorithm 1, with the clip and the penalty of its code (google-research/dpok).

    Per step -w A clip(r, 1 - eps, 1 + eps) without PPO's maximum: outside the range a sample has no policy gradient
    in either direction.
    """

    def __init__(
        self,
        config: DpokConfig,
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

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track = self.with_kl_weights(track, reward_weights=self._reward_weights)
        return track_advantages(track, self._advantage, reward_weights=self._reward_weights)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return old_log_prob_steps(track, forward, replays=self._replays_anchor)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        counted = step_counts(track)
        return {"policy": counted, "kl": counted} if self._config.kl_coef else {"policy": counted}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, counted = self._config, step_counts(track)
        new = forward(track)
        assert isinstance(new, Replayed)
        log_ratio = new.log_probs - per_action(track, "log_probs")
        ratio = bounded_ratio(log_ratio)
        clipped = ratio.clamp(1.0 - config.clip_range, 1.0 + config.clip_range)
        values = -expand_leading(advantages_of(track), ratio) * clipped
        terms = [LossTerm(name="policy", values=values, weights=counted, scale=config.reward_weight)]
        metrics = ratio_metrics(ratio.detach(), clipped != ratio, log_ratio.detach(), counted)
        if config.kl_coef:
            with torch.no_grad():
                reference = forward(track, policy="reference")
                assert isinstance(reference, Replayed)
            kl = velocity_shift_squared(track.latent, new, reference)
            terms.append(LossTerm(name="kl", values=self.gated(kl, track), weights=counted, scale=self.kl_coef))
            metrics["kl"] = mean_over(kl, counted)
        return Losses(terms=terms, metrics=metrics)


class CriticDpok(Dpok):
    """With A = R - V(x_t, text, sigma) at each step."""

    trains_critic = True

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Nothing yet: they are computed after the old-log-prob pass, from the critic's values."""
        return track, {}

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """Without discount and with lambda 1, GAE is the reward less the value."""
        assert track.rewards is not None
        counted = step_counts(track)
        rewards = token_rewards(track.rewards, counted > 0)
        return with_advantages_from_values(
            track, rewards, counted, gamma=1.0, lam=1.0, whitens=False, sum_over_ranks=sum_over_ranks
        )

    def critic_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"value": step_counts(track)}

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        """Half the squared error, without a clip."""
        counted = step_counts(track)
        losses, metrics = value_losses(track, values, counted, clip=None)
        return Losses(terms=[LossTerm(name="value", values=losses, weights=counted)], metrics=metrics)
