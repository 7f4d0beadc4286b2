"""DRaFT: the gradient of a reward through the last denoise steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from unirl.algorithms.draft.config import DraftConfig
from unirl.core.roles import Forward, GradientScore, Losses, LossTerm, Metric
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.through_sampler import through_sampler, with_step_means
from unirl.numerics.forward_process import FORWARD, clean_estimate, forward_noise, noised
from unirl.numerics.loss.policy_metrics import mean_over
from unirl.numerics.noise import stream

__all__ = ["Draft", "build"]

STOP = -2
"""The step number of the draw of the step at which denoising stops."""


def build(
    config: DraftConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
    score: GradientScore | None,
) -> Draft:
    check_config(config, key="algorithm")
    return Draft(config, score=score, seed=seed)


class Draft:
    """DRaFT-K and DRaFT-LV, arXiv 2309.17400, algorithm 1; with `stop_window` ReFL, arXiv 2304.05977, algorithm 1.

    The last K steps of each stored trajectory are recomputed with gradient and decoded, and the loss is the negative
    reward of that. There are no advantages: each sample follows the slope of its own reward.
    """

    def __init__(self, config: DraftConfig, *, score: GradientScore | None, seed: int) -> None:
        self._config, self._score, self._seed = config, score, seed

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is: the loss has none."""
        return track, {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """The track with what the noise of its stochastic steps is measured from."""
        reach = self._config.gradient_steps + self._config.stop_window - 1
        return (
            track if self._config.noise_draws else with_step_means(track, forward, first=track.latent.num_steps - reach)
        )

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"reward": track.sample_weights[:, None].expand(-1, max(self._config.noise_draws, 1))}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        assert self._score is not None, "built without rewards, which are where training runs"
        weights, limit = self.loss_weights(track)["reward"], self._config.reward_limit
        stop = self._stop(track.latent.num_steps, progress)
        latents = (
            self._renoised(track, forward, stop) if self._config.noise_draws else [self._steps(track, forward, stop)]
        )
        rewards = torch.stack([self._score(track, forward.decode(track, x)) for x in latents], dim=1)
        values = -rewards if limit is None else (limit - rewards).clamp(min=0)
        metrics = {"reward_recomputed": mean_over(rewards, weights)}
        if not self._config.noise_draws and stop == track.latent.num_steps - 1:
            # Rows of weight 0 repeat a sample, or are padding.
            gap = (latents[0].detach() - track.latent.final).abs().flatten(1).amax(dim=1)
            largest = torch.where(weights[:, 0] > 0, gap, 0.0).max()
            metrics["latent_mismatch_max"] = Metric(total=float(largest), reduce="max")
        return Losses(terms=[LossTerm(name="reward", values=values, weights=weights)], metrics=metrics)

    def _stop(self, num_steps: int, progress: float) -> int:
        """The step at which denoising stops: one for all samples of a training step, on all ranks."""
        window = self._config.stop_window
        bits = stream(seed=self._seed, rollout=FORWARD, label=f"{progress!r}", step=STOP)
        return num_steps - 1 - int(bits.random_raw() % window)

    def _steps(self, track: Track, forward: Forward, stop: int) -> Tensor:
        """DRaFT-K: the last K velocities up to `stop`."""
        return through_sampler(
            lambda x, sigma: forward.velocity(track, x, sigma, guided=True),
            track.latent,
            first=stop + 1 - self._config.gradient_steps,
            last=stop,
            checkpointed=self._config.checkpointing,
        )

    def _renoised(self, track: Track, forward: Forward, stop: int) -> Sequence[Tensor]:
        """DRaFT-LV: clean estimates from the clean latents, noised to the level of `stop`."""
        x0, draws = track.latent.final.float(), self._config.noise_draws
        noise = forward_noise(seed=self._seed, ids=track.sample_ids, draws=draws, shape=x0.shape[1:], device=x0.device)
        sigma = track.latent.sigmas[stop].to(x0.device).expand(len(x0), draws)
        x = noised(x0[:, None], noise, sigma)
        return clean_estimate(x, forward.velocity(track, x, sigma, guided=True), sigma).unbind(dim=1)
