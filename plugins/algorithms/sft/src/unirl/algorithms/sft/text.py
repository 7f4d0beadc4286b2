"""The next-token loss on given completions: supervised fine-tuning of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.sft.config import TextSftConfig
from unirl.core.roles import Algorithm, Forward, Losses
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.policy import TokenWeights, text_numbers, token_weights

__all__ = ["TextSft", "build"]


def build(
    config: TextSftConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> TextSft:
    check_config(config, key="algorithm")
    return TextSft(config)


class TextSft(Algorithm):
    """Negative log-likelihood of the completions' tokens, their end included, given the prompt.

    Rewards and advantages are not read.
    """

    def __init__(self, config: TextSftConfig) -> None:
        self._config = config

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is: every completion counts alike."""
        return track, text_numbers(track)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"nll": self._weights(track).announced}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self._weights(track)
        # Values at weight 0 may be NaN.
        values = torch.where(weights.counted > 0, -forward(track).log_probs, 0.0)
        return Losses(terms=[weights.term("nll", values)], metrics={"nll": mean_over(values, weights.counted)})

    def _weights(self, track: Track) -> TokenWeights:
        return token_weights(track, cast(AggregationMode, self._config.aggregation))
