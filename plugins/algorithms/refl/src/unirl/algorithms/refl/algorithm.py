"""ReFL: the gradient of a reward through one late denoise step, drawn at random."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.refl.config import ReflConfig
from unirl.core.roles import Forward
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import through_sampler
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Refl", "build"]


class Refl(RewardGradient):
    """ReFL, arXiv 2304.05977, algorithm 1.

    Denoising stops at a late step, the same for all samples of a training step. Its velocity leads straight to the
    clean estimate, x - sigma v, which is decoded and scored; the latents at the step are constants. The published code
    takes the index of the step for its timestep, and the timestep before for the last step; this takes the sigma of
    each step.
    """

    def __init__(self, config: ReflConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        last = track.latent.num_steps - 1
        stop = last - self.draw(self._config.stop_window, track, number=0)
        x = through_sampler(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            first=stop,
            last=stop,
            checkpointed=self._config.checkpointing,
        )
        return Estimates(latents=[x])


build = Refl.build
