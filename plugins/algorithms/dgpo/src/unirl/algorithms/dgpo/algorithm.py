"""Direct group preference optimization: the better samples of a prompt preferred to the worse ones, by their ELBO."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.algorithms.dgpo.config import DgpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Policy
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.elbo import elbo
from unirl.numerics.forward_process import PointLosses, forward_points
from unirl.numerics.loss.losses import mean_shift_squared
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.train.group_units import compared_weights, unit_centred, unit_mean, with_group_units

__all__ = ["Dgpo", "build"]


def build(
    config: DgpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Dgpo:
    check_config(config, key="algorithm")
    return Dgpo(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class Dgpo(PointLosses, Algorithm):
    """DGPO, arXiv 2510.08425, for flow matching: -log sigmoid(beta mean_i A_i (ELBO_i - ELBO_i of the reference)).

    The samples of a prompt are a unit, noised alike at the same levels. Those above the mean make the preferred set and
    those below it the rejected one, each with weight |A|. As the A of a group sum to 0, both sets weigh the same, and
    the normalizing constant of the implied rewards cancels.

    Our choices, where the paper leaves one: the mean over the group in place of the sum, so that for a pair with
    advantages 1 and -1 the loss is that of Diffusion-DPO with the same beta; a weight of 1 at every noise level; the
    advantages centred once more in the loss, since a clip and a selection of samples move their mean; and no weight for
    groups of equal rewards. The authors' code has the same margin, and a gradient without the factor beta; it also
    clips, sample by sample, against a moving average of the policy.
    """

    def __init__(
        self,
        config: DgpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        seed: int,
    ) -> None:
        self._config, self._advantage, self._reward_weights, self._seed = config, advantage, reward_weights, seed
        self.num_points = config.num_points

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """Also the groups as units."""
        return with_group_units(track, self._advantage, reward_weights=self._reward_weights)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        """[n, k]: each sample has the loss of its group."""
        points = compared_weights(track)[:, None].expand_as(self.point_weights(track))
        return {"policy": points, "kl": points} if self._config.kl_coef else {"policy": points}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        assert track.advantages is not None
        weights = self.loss_weights(track)["policy"]
        at = forward_points(track.latent, self._config, seed=self._seed, ids=track.unit_ids or track.sample_ids)
        compared: Policy = "lagged" if self._config.moving_reference else "reference"
        live = forward.velocity(track, at.x, at.sigma)
        other = forward.velocity(track, at.x, at.sigma, policy=compared)
        gain = elbo(live, at) - elbo(other, at)
        preference = unit_centred(track.advantages.double(), track)[:, None]
        margin = self._config.beta * unit_mean(preference * gain, track)
        metrics = {
            "implicit_accuracy": mean_over((margin > 0).float(), weights),
            "margin": mean_over(margin, weights),
            "winner_gain": mean_over(gain, weights * (preference > 0)),
            "loser_gain": mean_over(gain, weights * (preference < 0)),
        }
        values = -torch.nn.functional.logsigmoid(margin)
        terms = [LossTerm(name="policy", values=values, weights=weights)]
        if self._config.kl_coef:
            initial = other if compared == "reference" else forward.velocity(track, at.x, at.sigma, policy="reference")
            kl = mean_shift_squared(live, initial)
            terms.append(LossTerm(name="kl", values=kl, weights=weights, scale=self._config.kl_coef))
            metrics["kl"] = mean_over(kl, weights)
        return Losses(terms=terms, metrics=metrics)
