"""Flow-matching regression: the pretraining loss, on samples that a data set or an engine gives."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from unirl.algorithms.sft.config import SftConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import PointLosses, forward_points, matching_error
from unirl.numerics.loss.policy_metrics import mean_over

__all__ = ["Sft", "build"]


def build(
    config: SftConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Sft:
    check_config(config, key="algorithm")
    return Sft(config, seed=seed)


class Sft(PointLosses, Algorithm):
    """Conditional flow matching on the line of rectified flow: arXiv 2210.02747, equation 9; arXiv 2209.03003.

    Rewards and advantages are not read.
    """

    def __init__(self, config: SftConfig, *, seed: int) -> None:
        self._config, self._seed, self.num_points = config, seed, config.num_points

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is: every sample counts alike."""
        return track, {}

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"matching": self.point_weights(track)}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["matching"]
        at = forward_points(track.latent, self._config, seed=self._seed, ids=track.sample_ids)
        error = matching_error(forward.velocity(track, at.x, at.sigma), at)
        term = LossTerm(name="matching", values=error, weights=weights)
        return Losses(terms=[term], metrics={"matching_error": mean_over(error, weights)})
