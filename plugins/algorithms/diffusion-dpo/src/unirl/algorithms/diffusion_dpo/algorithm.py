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

    The best and the worst sample of each group are a unit; the others have weight 0. Both are noised alike, at the same
    levels, and the loss is that of a preference by how much closer than the reference the policy fits each.
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
        """Also the pair of each group as a unit. A group without two different rewards has none."""
        track, metrics = track_advantages(track, self._advantage, reward_weights=self._reward_weights)
        assert track.advantages is not None
        values, weights = track.advantages.tolist(), torch.zeros_like(track.sample_weights)
        units = list(track.sample_ids)
        without_pair = 0
        for group, rows in track.groups().items():
            # By id where advantages are equal: the order of the rows must not matter.
            ranked = sorted(
                (row for row in rows if float(track.sample_weights[row])),
                key=lambda row: (values[row], track.sample_ids[row]),
            )
            if not ranked or values[ranked[0]] == values[ranked[-1]]:
                without_pair += 1
                continue
            pair = [ranked[-1], ranked[0]]
            if len({track.inputs.texts[row] for row in pair}) > 1:
                raise BatchError(
                    f"algorithm: got samples of the prompts {[track.inputs.texts[row] for row in pair]} in group "
                    f"{group!r}, expected one prompt: a preference is between samples of the same prompt."
                )
            for row in pair:
                units[row], weights[row] = f"{group}/pair", track.sample_weights[row]
        numbers = {**metrics, "groups_without_pair": float(without_pair)}
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
        """For each row, the loser that it is compared with, itself where it is no winner; and the weight of its pair."""
        assert track.advantages is not None
        losers, weights = list(range(track.num_rows)), torch.zeros_like(track.sample_weights)
        for rows in track.units():
            if len(rows) == 1:
                continue
            if len(rows) != 2:
                ids = [track.sample_ids[row] for row in rows]
                raise BatchError(f"algorithm: got a unit of the samples {ids}, expected two: a winner and a loser.")
            loser, winner = sorted(rows, key=lambda row: float(track.advantages[row]))
            if track.advantages[winner] > track.advantages[loser]:
                losers[winner] = loser
                weights[winner] = torch.minimum(track.sample_weights[winner], track.sample_weights[loser])
        return torch.tensor(losers, device=weights.device), weights
