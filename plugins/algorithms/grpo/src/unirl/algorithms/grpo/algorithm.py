"""GRPO over the tokens of a completion, with the variants that differ from it by a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor
from unirl.algorithms.grpo.config import GrpoConfig
from unirl.core.roles import Algorithm, Forward, Losses
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.losses import Surrogate, cispo_loss, sequence_log_ratio
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.losses import completion_surrogate
from unirl.numerics.tokens.overlong import soft_overlong_penalty
from unirl.numerics.tokens.policy import TokenWeights, old_log_prob_tokens, text_numbers, token_weights
from unirl.numerics.tokens.policy_loss import TokenPolicyLoss
from unirl.numerics.train.track_advantages import track_advantages

__all__ = ["Grpo", "build"]


def build(
    config: GrpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Grpo:
    check_config(config, key="algorithm")
    return Grpo(config, advantage=advantage, reward_weights=reward_weights, train=train)


class Grpo(TokenPolicyLoss, Algorithm):
    """GRPO, arXiv 2402.03300, equation 3: a clipped surrogate per token, with the advantage of its completion.

    Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071), CISPO (2506.13585), RLOO (2402.14740) and REINFORCE++
    (2501.03262) are this with the settings that the configs of those names have.
    """

    def __init__(
        self,
        config: GrpoConfig,
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
        has_constant = config.aggregation == "seq-mean-token-sum-norm"
        self._horizon = float(config.horizon or config.max_length) if has_constant else None

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Advantages of the rewards, less the overlong penalty if one is set."""
        config, shaping, numbers = self._config, dict[str, Tensor](), text_numbers(track)
        if config.overlong_buffer:
            lengths = torch.tensor(track.text.sampled_lengths, device=track.sample_weights.device)
            penalty = soft_overlong_penalty(lengths, max_tokens=config.max_length, buffer=config.overlong_buffer)
            shaping["overlong"] = config.overlong_penalty * penalty
            counted = mean_over(shaping["overlong"], track.sample_weights)
            numbers["overlong_penalty"] = float(counted.total / counted.weight) if counted.weight else 0.0
        track = self.with_kl_weights(track, reward_weights=self._reward_weights)
        result, further = track_advantages(track, self._advantage, reward_weights=self._reward_weights, shaping=shaping)
        return result, {**numbers, **further}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Old log-probs: recomputed exactly as in the update, or the engine's unchanged."""
        return old_log_prob_tokens(
            track, forward, replays=self._replays_anchor, keeps_engine=self._config.tis != "none"
        )

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return self.policy_weights(self._policy_weights(track), self._token_weights(track))

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        advantages = track.advantages
        assert advantages is not None

        def surrogate(live: Tensor, old: Tensor, counted: Tensor) -> tuple[Surrogate, Tensor]:
            return self._surrogate(live, old, advantages, counted)

        policy, every = self._policy_weights(track), self._token_weights(track)
        return self.policy_losses(track, forward, surrogate, policy=policy, every=every)

    def _surrogate(self, live: Tensor, old: Tensor, advantages: Tensor, is_counted: Tensor) -> tuple[Surrogate, Tensor]:
        """The policy loss of each token, and the detached log-ratio that is clipped. All [n, S]."""
        if self._config.loss == "cispo":
            low, high = self._config.clip_bounds
            return cispo_loss(live, old, advantages, clip_low=low, clip_high=high), (live - old).detach()
        log_ratio = live - old
        if self._config.ratio == "completion":
            (low, high), dual = self._config.clip_bounds, self._config.dual_clip
            result = completion_surrogate(
                log_ratio, is_counted, advantages, clip_low=low, clip_high=high, dual_clip=dual
            )
            whole = torch.where(is_counted, log_ratio.detach(), 0.0).sum(dim=1, keepdim=True)
            return result, whole.expand_as(log_ratio)
        if self._config.ratio == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, is_counted)
        return self.clipped_tokens(log_ratio, advantages)

    def _policy_weights(self, track: Track) -> TokenWeights:
        return self._token_weights(track, drop_zero_advantage=self._config.drop_zero_advantage)

    def _token_weights(self, track: Track, *, drop_zero_advantage: bool = False) -> TokenWeights:
        """Token weights of the KL and entropy terms, and of the policy loss unless it drops some."""
        return token_weights(
            track,
            cast(AggregationMode, self._config.aggregation),
            horizon=self._horizon,
            truncated=cast("Literal['keep', 'mask']", self._config.truncated),
            drop_zero_advantage=drop_zero_advantage,
        )
