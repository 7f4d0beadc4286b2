"""DiffusionNFT: online RL on the forward process, without trajectories and log-probs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from unirl.algorithms.diffusion_nft.config import DiffusionNftConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.forward_process import PointLosses, clean_estimate, forward_points, self_weighted_error
from unirl.numerics.loss.losses import mean_shift_squared
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.train.track_advantages import track_advantages

__all__ = ["DiffusionNft", "build"]


def build(
    config: DiffusionNftConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> DiffusionNft:
    check_config(config, key="algorithm")
    return DiffusionNft(config, advantage=advantage, reward_weights=reward_weights, seed=seed)


class DiffusionNft(PointLosses, Algorithm):
    """DiffusionNFT, arXiv 2509.16117, equation 6 with the adaptive weighting of its code.

    The clean latents of a lagged policy are noised again. At each point the trained velocity v and the lagged one v_old
    give a positive policy, beta v + (1 - beta) v_old, and a negative one, (1 + beta) v_old - beta v; samples of high
    reward pull the first towards them, and those of low reward the second.
    """

    def __init__(
        self,
        config: DiffusionNftConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        seed: int,
    ) -> None:
        self._config, self._advantage, self._reward_weights, self._seed = config, advantage, reward_weights, seed
        self.num_points = config.num_points

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return track_advantages(track, self._advantage, reward_weights=self._reward_weights)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        points = self.point_weights(track)
        return {"policy": points, "kl": points} if self._config.kl_coef else {"policy": points}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self.loss_weights(track)
        at = forward_points(track.latent, config, seed=self._seed, ids=track.sample_ids)
        live = forward.velocity(track, at.x, at.sigma)
        old = forward.velocity(track, at.x, at.sigma, policy="lagged")

        def error(velocity: Tensor) -> Tensor:
            return self_weighted_error(clean_estimate(at.x, velocity, at.sigma), at.x0, adaptive=config.adaptive_weight)

        beta, clip, advantages = config.beta, config.advantage_clip, track.advantages
        assert advantages is not None
        optimality = (advantages.clamp(-clip, clip) / (2 * clip) + 0.5)[:, None]
        positive, negative = error(beta * live + (1 - beta) * old), error((1 + beta) * old - beta * live)
        values = (optimality * positive + (1 - optimality) * negative) / beta
        terms = [LossTerm(name="policy", values=values, weights=weights["policy"], scale=config.scale)]
        metrics = {"velocity_shift": mean_over(mean_shift_squared(live, old), weights["policy"])}
        if config.kl_coef:
            kl = mean_shift_squared(live, forward.velocity(track, at.x, at.sigma, policy="reference"))
            terms.append(LossTerm(name="kl", values=kl, weights=weights["kl"], scale=config.kl_coef))
            metrics["kl"] = mean_over(kl, weights["kl"])
        return Losses(terms=terms, metrics=metrics)
