"""ELBO policy gradients: EPG, PEPG and PAR, with the ELBO of the final sample as its log-prob."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.epg.config import EpgConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.elbo import ElboWeighting, elbo
from unirl.numerics.forward_process import PointLosses, Points, forward_points
from unirl.numerics.loss.losses import LOG_RATIO_MAX, bounded_ratio, mean_shift_squared
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.train.track_advantages import track_advantages

__all__ = ["Epg", "build"]


def build(
    config: EpgConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Epg:
    check_config(config, key="algorithm")
    return Epg(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class Epg(PointLosses, Algorithm):
    """EPG, PEPG and PAR, arXiv 2602.04663, without a clip, over the ELBO in place of the log-prob.

    The gradients are those of the paper, with r the ratio to the policy that sampled and its stop-gradients: -r A for
    EPG, -r (A - log r) for PEPG and PAR, each times that of the log-prob. The values are ours where the paper's are not
    comparable from step to step: -r A, and for PEPG the non-negative r log r - r + 1 added, an estimate of the KL
    divergence from the policy that sampled. Ours as well: the KL penalty `kl_coef` is that of the other losses over the
    forward process, a squared distance of velocities.
    """

    def __init__(
        self,
        config: EpgConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        seed: int,
    ) -> None:
        self._config, self._advantage, self._reward_weights, self._seed = config, advantage, reward_weights, seed
        self.num_points, self.separates_steps = config.num_points, config.ratio_over == "point"

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return track_advantages(track, self._advantage, reward_weights=self._reward_weights)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track with the log-prob at each point, [n, k], under the policy that sampled."""
        at = self._points(track)
        with torch.no_grad():
            old = self._log_probs(forward.velocity(track, at.x, at.sigma), at)
        return dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=old))

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        points = self.point_weights(track)
        policy = points if self._config.ratio_over == "point" else points[:, :1]
        return {"policy": policy, "kl": points} if self._config.kl_coef else {"policy": policy}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights, at = self._config, self.loss_weights(track), self._points(track)
        old, advantages = track.latent.log_probs, track.advantages
        assert old is not None and advantages is not None
        live = forward.velocity(track, at.x, at.sigma)
        log_ratio = self._log_probs(live, at) - old
        if config.ratio_over == "sample":
            log_ratio = log_ratio.mean(dim=1, keepdim=True)
        ratio = bounded_ratio(log_ratio)
        values = self._values(log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX), ratio, advantages.double()[:, None])
        terms = [LossTerm(name="policy", values=values, weights=weights["policy"])]
        is_bounded = log_ratio.detach().abs() > LOG_RATIO_MAX
        metrics = ratio_metrics(ratio.detach(), is_bounded, log_ratio.detach(), weights["policy"])
        metrics["elbo"] = mean_over(elbo(live.detach(), at), weights["policy"].expand_as(old))
        if config.kl_coef:
            kl = mean_shift_squared(live, forward.velocity(track, at.x, at.sigma, policy="reference"))
            terms.append(LossTerm(name="kl", values=kl, weights=weights["kl"], scale=config.kl_coef))
            metrics["kl"] = mean_over(kl, weights["kl"])
        return Losses(terms=terms, metrics=metrics)

    def _values(self, log_ratio: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The loss of each ratio, all [n, k] or broadcast to it."""
        if self._config.form == "par":
            return 0.5 * ratio.detach() * (advantages - log_ratio).square()
        penalty = ratio * log_ratio - ratio + 1 if self._config.form == "pepg" else 0.0
        return penalty - ratio * advantages

    def _points(self, track: Track) -> Points:
        return forward_points(track.latent, self._config, seed=self._seed, ids=track.sample_ids)

    def _log_probs(self, velocity: Tensor, at: Points) -> Tensor:
        """[n, k] fp64."""
        weighting = cast(ElboWeighting, self._config.weighting)
        return self._config.elbo_scale * elbo(velocity, at, weighting=weighting)
