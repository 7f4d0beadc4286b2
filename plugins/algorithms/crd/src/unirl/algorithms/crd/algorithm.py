"""Centred reward distillation: implied rewards of a policy, its ELBO over another's, fitted to those of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor
from unirl.algorithms.crd.config import CrdConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Policy
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.elbo import ElboWeighting, elbo
from unirl.numerics.forward_process import PointLosses, forward_points
from unirl.numerics.loss.losses import mean_shift_squared
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.train.group_units import compared_weights, unit_centred, with_group_units

__all__ = ["Crd", "build"]


def build(
    config: CrdConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Crd:
    check_config(config, key="algorithm")
    return Crd(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class Crd(PointLosses, Algorithm):
    """CRD, arXiv 2603.14128: the mean of (beta (ELBO_i - ELBO_i of the reference) - r_i)^2, both terms centred in the
    group of the sample.

    The best policy under a KL penalty implies a reward of each sample, beta log p / p_ref plus a constant of the
    prompt, which cancels where both terms are centred. The regression has no ratio and is valid whoever sampled.

    Our choices, where the abstract does not decide: a regression at each point, whose noise and noise levels a group
    shares; advantages as the rewards (`advantage.normalize=false` leaves them centred rewards); and no weight for
    groups of equal rewards. Of the paper's means against drift, the pull to the initial policy is `kl_coef`, whose
    guidance is the stage's `reference_guidance`. Its strength does not depend on the reward, and the lagged policy
    that `moving_reference` compares with also samples, where the paper keeps two.
    """

    def __init__(
        self,
        config: CrdConfig,
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
        points = compared_weights(track)[:, None].expand_as(self.point_weights(track))
        return {"policy": points, "kl": points} if self._config.kl_coef else {"policy": points}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self.loss_weights(track)
        assert track.advantages is not None
        at = forward_points(track.latent, config, seed=self._seed, ids=track.unit_ids or track.sample_ids)
        compared: Policy = "lagged" if config.moving_reference else "reference"
        weighting = cast(ElboWeighting, config.weighting)
        live = forward.velocity(track, at.x, at.sigma)
        other = forward.velocity(track, at.x, at.sigma, policy=compared)
        gain = elbo(live, at, weighting=weighting) - elbo(other, at, weighting=weighting)
        implied = unit_centred(config.beta * gain, track)
        rewards = unit_centred(track.advantages.double(), track)[:, None].expand_as(implied)
        terms = [LossTerm(name="policy", values=(implied - rewards).square(), weights=weights["policy"])]
        metrics = {
            # 0 where the policies are equal, 1 where the rewards are fitted.
            "fitted": mean_over(implied / rewards, weights["policy"] * rewards.square()),
            "velocity_shift": mean_over(mean_shift_squared(live, other), weights["policy"]),
        }
        if config.kl_coef:
            initial = other if compared == "reference" else forward.velocity(track, at.x, at.sigma, policy="reference")
            kl = mean_shift_squared(live, initial)
            terms.append(LossTerm(name="kl", values=kl, weights=weights["kl"], scale=config.kl_coef))
            metrics["kl"] = mean_over(kl, weights["kl"])
        return Losses(terms=terms, metrics=metrics)
