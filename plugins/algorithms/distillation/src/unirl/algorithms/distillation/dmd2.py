"""Distribution matching distillation: a student of few steps, by the scores of a teacher and of its own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.distillation.config import Dmd2Config
from unirl.algorithms.distillation.matching import Matching
from unirl.core.roles import Forward, Losses, LossTerm
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.stored_points import stored_points
from unirl.numerics.forward_process import (
    LEAST_ERROR,
    Levels,
    Points,
    clean_estimate,
    drawn,
    forward_noise,
    forward_sigmas,
    levels_at,
    matching_error,
    noised,
    squared_error,
)
from unirl.numerics.loss.policy_metrics import mean_over

__all__ = ["Dmd2", "build"]


def build(
    config: Dmd2Config,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Dmd2:
    check_config(config, key="algorithm")
    return Dmd2(config, seed=seed)


class Dmd2(Matching):
    """DMD2, arXiv 2405.14867, without its discriminator: the gradient of DMD (arXiv 2311.18828, equations 7 and 8) at
    latents that the student's own sampler passed.

    From a latent x of its trajectory the student's velocity leads to a clean estimate, which is noised anew. There the
    teacher and the fake score, which learns the student's clean estimates, see different clean latents; the difference
    of the two, over the mean absolute distance of the teacher's from the student's, is the gradient of the estimate.

    Rewards and advantages are not read.
    """

    trains_fake_score = True

    def __init__(self, config: Dmd2Config, *, seed: int) -> None:
        super().__init__(num_points=config.num_points, seed=seed)
        self._config = config

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["matching"]
        clean = self._clean(track, forward)
        at = self._noised(track, clean.detach(), purpose="matching")
        fake, real = (
            clean_estimate(at.x, forward.velocity(track, at.x, at.sigma, policy=policy), at.sigma).double()
            for policy in ("fake", "reference")
        )
        size = (at.x0 - real).abs().flatten(2).mean(dim=2).clamp_min(LEAST_ERROR)
        gradient = (fake - real) / size.view(*size.shape, *(1,) * (clean.ndim - 2))
        values = squared_error(clean, at.x0 - gradient) / 2
        term = LossTerm(name="matching", values=values, weights=weights)
        gap = squared_error(fake, real)
        return Losses(terms=[term], metrics={"score_gap": mean_over(gap, weights)})

    def fake_score_weights(self, track: Track) -> Mapping[str, Tensor]:
        return {"denoising": self.point_weights(track)}

    def fake_score_loss(self, track: Track, forward: Forward, *, progress: float, repeat: int) -> Losses:
        with torch.no_grad():
            clean = self._clean(track, forward)
        at = self._noised(track, clean, purpose=f"fake score {repeat}")
        error = matching_error(forward.velocity(track, at.x, at.sigma, policy="fake"), at)
        weights = self.fake_score_weights(track)["denoising"]
        return Losses(terms=[LossTerm(name="denoising", values=error, weights=weights)])

    def _clean(self, track: Track, forward: Forward) -> Tensor:
        """[n, k, ...] fp32 clean estimates of the student at points of its trajectories."""
        x, sigma = stored_points(track.latent, self._config.steps, seed=self._seed, ids=track.sample_ids)
        return clean_estimate(x, forward.velocity(track, x, sigma), sigma)

    def _noised(self, track: Track, clean: Tensor, *, purpose: str) -> Points:
        """The clean estimates [n, k, ...] with new noise, at levels that are drawn for each alone: those of
        `forward_points` would rise with the levels of the student's steps."""
        config, shape, device = self._config, clean.shape[2:], clean.device
        quantiles, noise = list[Tensor](), list[Tensor]()
        for draw in drawn(track.latent, self.num_points):
            ids = [f"{label} {purpose} {draw}" for label in track.sample_ids]
            first, last = config.point_range
            quantiles.append(forward_sigmas(seed=self._seed, ids=ids, draws=1, between=(first, last), device=device))
            noise.append(forward_noise(seed=self._seed, ids=ids, draws=1, shape=shape, device=device))
        schedule, x1 = track.latent.sigmas.to(device), torch.cat(noise, dim=1)
        sigma = levels_at(torch.cat(quantiles, dim=1), kind=cast(Levels, config.point_levels), schedule=schedule)
        return Points(x0=clean, x1=x1, sigma=sigma, x=noised(clean, x1, sigma))
