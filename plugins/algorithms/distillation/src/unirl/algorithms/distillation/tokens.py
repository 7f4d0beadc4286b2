"""Distillation at the tokens of the student's own completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.distillation.config import DistillationConfig
from unirl.core.roles import Algorithm, DivergenceKind, Forward, Losses
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.aggregation import AggregationMode
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.tokens.policy import TokenWeights, text_numbers, token_weights

__all__ = ["Distillation", "build"]


def build(
    config: DistillationConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Distillation:
    check_config(config, key="algorithm")
    return Distillation(config)


class Distillation(Algorithm):
    """GKD, arXiv 2306.13649, equation 3, with all samples from the student: the divergence between the next-token
    distributions of student and teacher, at each token of the completions. The gradient does not go through sampling.

    Rewards and advantages are not read.
    """

    def __init__(self, config: DistillationConfig) -> None:
        self._config = config

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is: every completion counts alike."""
        return track, text_numbers(track)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"divergence": self._weights(track).announced}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self._weights(track)
        kind = cast(DivergenceKind, config.divergence)
        result = forward.divergence(track, kind=kind, beta=config.beta, top_k=config.top_k)
        values = result.divergence
        assert values is not None
        # Values at weight 0 may be NaN.
        values = torch.where(weights.counted > 0, values, 0.0)
        return Losses(
            terms=[weights.term("divergence", values)], metrics={"divergence": mean_over(values, weights.counted)}
        )

    def _weights(self, track: Track) -> TokenWeights:
        return token_weights(track, cast(AggregationMode, self._config.aggregation))
