"""Distillation of the velocity on the student's own trajectories."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from unirl.algorithms.distillation.config import VelocityDistillationConfig
from unirl.algorithms.distillation.matching import Matching
from unirl.core.roles import Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.stored_points import stored_points
from unirl.numerics.forward_process import forward_points, squared_error
from unirl.numerics.loss.policy_metrics import mean_over

__all__ = ["VelocityDistillation", "build"]


def build(
    config: VelocityDistillationConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> VelocityDistillation:
    check_config(config, key="algorithm")
    return VelocityDistillation(config, seed=seed)


class VelocityDistillation(Matching):
    """mean (v_student - v_teacher)^2 over the elements of latents that the student's sampler passed, or of its samples
    noised again. The gradient does not go through the sampler.

    Rewards and advantages are not read.
    """

    def __init__(self, config: VelocityDistillationConfig, *, seed: int) -> None:
        super().__init__(num_points=config.num_points, seed=seed)
        self._config = config

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["matching"]
        x, sigma = self._points(track)
        teacher = forward.velocity(track, x, sigma, policy="reference")
        error = squared_error(forward.velocity(track, x, sigma), teacher)
        term = LossTerm(name="matching", values=error, weights=weights)
        return Losses(terms=[term], metrics={"velocity_error": mean_over(error, weights)})

    def _points(self, track: Track) -> tuple[Tensor, Tensor]:
        config, seed = self._config, self._seed
        if config.on_trajectory:
            return stored_points(track.latent, config, seed=seed, ids=track.sample_ids)
        at = forward_points(track.latent, config, seed=seed, ids=track.sample_ids)
        return at.x, at.sigma
