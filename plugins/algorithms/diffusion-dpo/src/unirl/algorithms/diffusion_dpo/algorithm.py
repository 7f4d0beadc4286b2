"""Diffusion-DPO: preferences between two samples of a prompt, by their errors of flow matching."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.algorithms.diffusion_dpo.config import DiffusionDpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import PointLosses, forward_points, matching_error
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.train.preference_pairs import losers_of, with_pairs

__all__ = ["DiffusionDpo", "build"]


def build(
    config: DiffusionDpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> DiffusionDpo:
    check_config(config, key="algorithm")
    return DiffusionDpo(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class DiffusionDpo(PointLosses, Algorithm):
    """Diffusion-DPO, arXiv 2311.12908, equation 14, for flow matching.

    The best and the worst sample of each group are a unit; those in no pair have weight 0. Both are noised alike, at
    the same levels, and the loss is that of a preference by how much closer than the reference the policy fits each.
    """

    def __init__(
        self,
        config: DiffusionDpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        seed: int,
    ) -> None:
        self._config, self._advantage, self._reward_weights, self._seed = config, advantage, reward_weights, seed
        self.num_points = config.num_points

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Also the pairs of each group as units. A group without two different rewards has none."""
        return with_pairs(
            track, self._advantage, reward_weights=self._reward_weights, pairs_per_group=self._config.pairs_per_group
        )

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        """[n, k]: of each pair at its winner, 0 elsewhere. A pair without a preference weighs nothing."""
        _, weights = losers_of(track)
        return {"policy": weights[:, None].expand_as(self.point_weights(track))}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["policy"]
        at = forward_points(track.latent, self._config, seed=self._seed, ids=track.unit_ids or track.sample_ids)
        live = matching_error(forward.velocity(track, at.x, at.sigma), at)
        reference = matching_error(forward.velocity(track, at.x, at.sigma, policy="reference"), at)
        gain = reference - live
        losers, _ = losers_of(track)
        margin = 0.5 * self._config.beta * (gain - gain[losers])
        values = -torch.nn.functional.logsigmoid(margin)
        metrics = {
            "implicit_accuracy": mean_over((margin > 0).float(), weights),
            "margin": mean_over(margin, weights),
            "winner_gain": mean_over(gain, weights),
            "loser_gain": mean_over(gain[losers], weights),
        }
        return Losses(terms=[LossTerm(name="policy", values=values, weights=weights)], metrics=metrics)
