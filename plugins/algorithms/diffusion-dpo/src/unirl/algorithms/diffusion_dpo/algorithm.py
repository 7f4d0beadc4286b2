"""Diffusion-DPO: preferences between two samples of a prompt, by their errors of flow matching."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.algorithms.diffusion_dpo.config import DiffusionDpoConfig
from unirl.core.errors import BatchError
from unirl.core.roles import Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import forward_points, matching_error
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.train.track_advantages import track_advantages

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


class DiffusionDpo:
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

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Also the pairs of each group as units. A group without two different rewards has none."""
        track, metrics = track_advantages(track, self._advantage, reward_weights=self._reward_weights)
        assert track.advantages is not None
        values, weights = track.advantages.tolist(), torch.zeros_like(track.sample_weights)
        units, num_pairs, without = list(track.sample_ids), 0, 0
        for group, rows in track.groups().items():
            counted = (row for row in rows if float(track.sample_weights[row]))
            # By id where advantages are equal: the order of the rows must not matter.
            ranked = sorted(counted, key=lambda row: (values[row], track.sample_ids[row]))
            places = range(min(self._config.pairs_per_group, len(ranked) // 2))
            pairs = [(ranked[-1 - place], ranked[place]) for place in places]
            pairs = [pair for pair in pairs if values[pair[0]] > values[pair[1]]]
            for place, pair in enumerate(pairs):
                for row in pair:
                    units[row], weights[row] = f"{group}/pair-{place}", track.sample_weights[row]
            num_pairs, without = num_pairs + len(pairs), without + (not pairs)
        numbers = {**metrics, "pairs": float(num_pairs), "groups_without_pair": float(without)}
        return dataclasses.replace(track, unit_ids=tuple(units), sample_weights=weights), numbers

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track as it is: the loss has no ratio."""
        return track

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        """[n, k]: of each pair at its winner, 0 elsewhere. A pair without a preference weighs nothing."""
        _, weights = self._pairs(track)
        return {"policy": weights[:, None].expand(-1, self._config.num_points)}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["policy"]
        at = forward_points(track.latent, self._config, seed=self._seed, ids=track.unit_ids or track.sample_ids)
        live = matching_error(forward.velocity(track, at.x, at.sigma), at)
        reference = matching_error(forward.velocity(track, at.x, at.sigma, policy="reference"), at)
        gain = reference - live
        losers, _ = self._pairs(track)
        margin = 0.5 * self._config.beta * (gain - gain[losers])
        values = -torch.nn.functional.logsigmoid(margin)
        metrics = {
            "implicit_accuracy": mean_over((margin > 0).float(), weights),
            "margin": mean_over(margin, weights),
            "winner_gain": mean_over(gain, weights),
            "loser_gain": mean_over(gain[losers], weights),
        }
        return Losses(terms=[LossTerm(name="policy", values=values, weights=weights)], metrics=metrics)

    def _pairs(self, track: Track) -> tuple[Tensor, Tensor]:
        """For each row the loser it is compared with, itself where it is not a winner; and the weight of its pair."""
        advantages = track.advantages
        assert advantages is not None
        losers, weights = list(range(track.num_rows)), torch.zeros_like(track.sample_weights)
        for rows in track.units():
            if len(rows) == 1:
                continue
            ids, texts = ([of[row] for row in rows] for of in (track.sample_ids, track.inputs.texts))
            if len(rows) != 2:
                raise BatchError(f"algorithm: got a unit of the samples {ids}, expected two: a winner and a loser.")
            if texts[0] != texts[1]:
                raise BatchError(
                    f"algorithm: got samples {ids} of the prompts {texts} as a pair, expected one prompt: a preference "
                    "is between samples of the same prompt. Set stages.STAGE.group=parent."
                )
            loser, winner = sorted(rows, key=lambda row: float(advantages[row]))
            if float(advantages[winner]) > float(advantages[loser]):
                losers[winner] = loser
                weights[winner] = torch.minimum(track.sample_weights[winner], track.sample_weights[loser])
        return torch.tensor(losers, device=weights.device), weights
