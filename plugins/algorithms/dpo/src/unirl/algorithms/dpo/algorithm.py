"""DPO: preferences between two completions of a prompt, by their log-probs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from unirl.algorithms.dpo.config import DpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Policy
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.policy import text_numbers
from unirl.numerics.tokens.replay import token_mask
from unirl.numerics.train.preference_pairs import losers_of, with_pairs

__all__ = ["Dpo", "build"]


def build(
    config: DpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Dpo:
    check_config(config, key="algorithm")
    return Dpo(config, advantage=advantage, reward_weights=reward_weights)


class Dpo(Algorithm):
    """DPO, arXiv 2305.18290, equation 7.

    The best and the worst completion of each group are a unit; those in no pair have weight 0. The loss is that of a
    preference by how much more than under the reference policy the log-prob of each has grown.
    """

    def __init__(self, config: DpoConfig, *, advantage: AdvantageConfig, reward_weights: Mapping[str, float]) -> None:
        self._config, self._advantage, self._reward_weights = config, advantage, reward_weights

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Also the pairs of each group as units. A group without two different rewards has none."""
        numbers = text_numbers(track)
        track, further = with_pairs(
            track, self._advantage, reward_weights=self._reward_weights, pairs_per_group=self._config.pairs_per_group
        )
        return track, {**numbers, **further}

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        """[n, 1]: of each pair at its winner, 0 elsewhere. A pair without a preference weighs nothing."""
        return {"policy": losers_of(track)[1][:, None]}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, (losers, weights) = self._config, losers_of(track)
        gain = self._log_probs(track, forward, "live") - self._log_probs(track, forward, "reference")
        margin = config.beta * (gain - gain[losers])
        smoothing = config.label_smoothing
        values = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        metrics = {
            "implicit_accuracy": mean_over((margin > 0).float(), weights),
            "margin": mean_over(margin, weights),
            "winner_gain": mean_over(gain, weights),
            "loser_gain": mean_over(gain[losers], weights),
        }
        term = LossTerm(name="policy", values=values[:, None], weights=weights[:, None])
        return Losses(terms=[term], metrics=metrics)

    def _log_probs(self, track: Track, forward: Forward, policy: Policy) -> Tensor:
        """[n] of whole completions under a policy, or their means over tokens; in fp64, for differences of them."""
        counted = token_mask(track.text)
        total = torch.where(counted, forward(track, policy=policy).log_probs.double(), 0.0).sum(dim=1)
        return total / counted.sum(dim=1).clamp(min=1) if self._config.length_normalized else total
