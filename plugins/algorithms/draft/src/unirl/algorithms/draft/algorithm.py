"""DRaFT: the gradient of a reward through the last denoise steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from unirl.algorithms.draft.config import DraftConfig
from unirl.core.roles import Forward
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import through_sampler, with_step_means
from unirl.numerics.forward_process import clean_estimate, forward_noise, noised
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Draft", "build"]


class Draft(RewardGradient):
    """DRaFT-K and DRaFT-LV, arXiv 2309.17400, algorithm 1.

    The last K steps of each stored trajectory are recomputed with gradient and decoded; the loss falls with the reward
    of that.
    """

    def __init__(self, config: DraftConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    @property
    def draw_weights(self) -> Sequence[float]:
        return (1.0,) * max(self._config.noise_draws, 1)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track with what the noise of its stochastic steps is measured from."""
        if self._config.noise_draws:
            return track
        return with_step_means(track, forward, first=track.latent.num_steps - self._config.gradient_steps)

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        if self._config.noise_draws:
            return Estimates(latents=self._renoised(track, forward))
        x = through_sampler(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            first=track.latent.num_steps - self._config.gradient_steps,
            checkpointed=self._config.checkpointing,
        )
        return Estimates(latents=[x], end_stored=True)

    def _renoised(self, track: Track, forward: Forward) -> Sequence[Tensor]:
        """DRaFT-LV: clean estimates from the clean latents, noised to the level of the last step."""
        x0, draws = track.latent.final.float(), self._config.noise_draws
        noise = forward_noise(seed=self.seed, ids=track.sample_ids, draws=draws, shape=x0.shape[1:], device=x0.device)
        sigma = track.latent.sigmas[-2].to(x0.device).expand(len(x0), draws)
        x = noised(x0[:, None], noise, sigma)
        return clean_estimate(x, forward.velocity(track, x, sigma, guided=True), sigma).unbind(dim=1)


build = Draft.build
