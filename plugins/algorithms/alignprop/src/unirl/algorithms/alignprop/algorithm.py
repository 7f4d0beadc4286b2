"""AlignProp: the gradient of a reward through a random number of last denoise steps."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.alignprop.config import AlignpropConfig
from unirl.core.roles import Forward
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import through_sampler, with_step_means
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Alignprop", "build"]


class Alignprop(RewardGradient):
    """AlignProp with randomised truncation, arXiv 2310.03739, section 4.

    As DRaFT-K, with K drawn for each training step: early steps get a gradient too, at a fraction of its cost and
    variance. K = 0, which the published code may draw, has no gradient at all and is never drawn here.
    """

    def __init__(self, config: AlignpropConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track with what the noise of its stochastic steps is measured from."""
        return with_step_means(track, forward, first=track.latent.num_steps - self._most(track))

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        steps = self._config.gradient_steps or 1 + self.draw(self._most(track), track, number=0)
        x = through_sampler(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            first=track.latent.num_steps - steps,
            checkpointed=self._config.checkpointing,
        )
        return Estimates(latents=[x], end_stored=True)

    def _most(self, track: Track) -> int:
        """The largest K."""
        return self._config.gradient_steps or self._config.max_gradient_steps or track.latent.num_steps


build = Alignprop.build
