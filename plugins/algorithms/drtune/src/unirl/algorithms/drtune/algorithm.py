"""DRTune: the gradient of a reward at steps spread over the trajectory, without products of Jacobians."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.drtune.config import DrtuneConfig
from unirl.core.roles import Forward
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import spread_steps, through_stored_inputs, with_step_means
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Drtune", "build"]

OFFSETS = 2**20
"""Offsets that are drawn from, a power of two so that they are exact; schedules have far fewer steps."""


class Drtune(RewardGradient):
    """DRTune, arXiv 2405.00760, algorithm 1.

    K steps spread from the first to the one at which denoising stops have a gradient, each by its velocity at the
    stored latents, which are constants. Nothing is multiplied by the Jacobian of another step, so early steps can be
    trained: their gradient neither grows nor vanishes on its way.
    """

    def __init__(self, config: DrtuneConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track with what the noise of its stochastic steps is measured from."""
        return with_step_means(track, forward, first=0)

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        last = track.latent.num_steps - 1
        stop = last - self.draw(self._config.stop_window, track, number=0)
        offset = self.draw(OFFSETS, track, number=1) / OFFSETS
        x = through_stored_inputs(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            gradient_steps=spread_steps(self._config.gradient_steps, num_steps=stop + 1, offset=offset),
            last=stop if stop < last else None,
            stacked=self.stacked,
            checkpointed=self._config.checkpointing,
        )
        return Estimates(latents=[x], end_stored=stop == last)


build = Drtune.build
