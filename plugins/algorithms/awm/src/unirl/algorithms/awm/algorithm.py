"""Advantage weighted matching: the policy gradient with the flow-matching loss in place of log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from unirl.algorithms.awm.config import AwmConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Policy
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import PointLosses, Points, forward_points, matching_error
from unirl.numerics.loss.losses import clipped_surrogate, mean_shift_squared
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.train.track_advantages import track_advantages

__all__ = ["Awm", "build"]

HUBER = 1e-10
"""Added to an error before its root or power, whose slope at 0 is infinite. Source: the published code."""


def build(
    config: AwmConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Awm:
    check_config(config, key="algorithm")
    return Awm(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class Awm(PointLosses, Algorithm):
    """Advantage weighted matching, arXiv 2509.25050, with the clipped ratio and the weightings of its published code.

    At points on the line from a clean latent to noise, the negative error of flow matching takes the place of the
    log-prob. At the first update the gradient is that of pretraining on the samples, each weighted by its advantage.
    """

    def __init__(
        self,
        config: AwmConfig,
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
        """The track with the log-prob of each point, [n, k], under the policy that sampled."""
        at = self._points(track)
        sampler: Policy = "lagged" if self._config.lagged_coef else "live"
        with torch.no_grad():
            old = self._log_probs(forward.velocity(track, at.x, at.sigma, policy=sampler), at)
        return dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=old))

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        points = self.point_weights(track)
        result = {"policy": points if self._config.ratio_over == "point" else points[:, :1]}
        return result | {name: points for name, coefficient in self._pulls().items() if coefficient}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights, at = self._config, self.loss_weights(track), self._points(track)
        old, advantages = track.latent.log_probs, track.advantages
        assert old is not None and advantages is not None
        live = forward.velocity(track, at.x, at.sigma)
        log_ratio = self._log_probs(live, at) - old
        if config.ratio_over == "sample":
            log_ratio = log_ratio.mean(dim=1, keepdim=True)
        surrogate = clipped_surrogate(log_ratio, advantages, clip_low=config.clip_range, clip_high=config.clip_range)
        terms = [LossTerm(name="policy", values=surrogate.loss, weights=weights["policy"], scale=config.scale)]
        metrics = ratio_metrics(surrogate.ratio, surrogate.clipped, log_ratio.detach(), weights["policy"])
        metrics["matching_error"] = mean_over(matching_error(live.detach(), at), weights["policy"].expand_as(old))
        for policy, coefficient in self._pulls().items():
            if coefficient:
                distance = mean_shift_squared(live, forward.velocity(track, at.x, at.sigma, policy=policy))
                terms.append(LossTerm(name=policy, values=distance, weights=weights[policy], scale=coefficient))
                metrics["kl" if policy == "reference" else "kl_lagged"] = mean_over(distance, weights[policy])
        return Losses(terms=terms, metrics=metrics)

    def _pulls(self) -> dict[Policy, float]:
        """Coefficient of the distance to the velocity of each policy."""
        return {"reference": self._config.kl_coef, "lagged": self._config.lagged_coef}

    def _points(self, track: Track) -> Points:
        return forward_points(track.latent, self._config, seed=self._seed, ids=track.sample_ids)

    def _log_probs(self, velocity: Tensor, at: Points) -> Tensor:
        """[n, k] fp32. Surrogate for the log-prob of each sample at its points."""
        error, power = matching_error(velocity, at), self._config.ghuber_power
        match self._config.weighting:
            case "t":
                return -at.sigma * error
            case "t2":
                return -at.sigma.square() * error
            case "huber":
                return -at.sigma * ((error + HUBER).sqrt() - HUBER**0.5)
            case "ghuber":
                return -at.sigma * ((error + HUBER).pow(power) - HUBER**power) / power
            case _:
                return -error
