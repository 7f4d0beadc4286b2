"""SRPO: the gradient of relative rewards through one step from noised clean latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.algorithms.srpo.config import SrpoConfig
from unirl.core.errors import RewardFailed
from unirl.core.roles import Forward, GradientScore
from unirl.core.types.track import Track
from unirl.numerics.forward_process import direct_align, forward_noise, forward_sigmas, noised
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Srpo", "build"]


class Srpo(RewardGradient):
    """Direct-Align with semantic relative preferences, arXiv 2509.06942, from the paper.

    Clean latents are noised with known noise, the model takes one step from there, and the same noise leads back to a
    clean estimate that is exact where the velocity is: every noise level gets a gradient through a single step. The
    reward of a prompt with a negative phrase may be subtracted from that with a positive one, equation 8, or lowered by
    inversion, equation 9. The paper does not say which levels are inverted; here it is the least noisy, where it finds
    that rewards are exploited.
    """

    def __init__(self, config: SrpoConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    @property
    def draw_weights(self) -> Sequence[float]:
        # Draws rise in noise.
        count = self._config.num_points
        return tuple(self._config.discount ** (count - 1 - number) for number in range(count))

    @property
    def rewarded_draws(self) -> Sequence[bool]:
        return tuple(not self._inverts(draw) for draw in range(self._config.num_points))

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        x0 = track.latent.final.float()
        where = {"seed": self.seed, "ids": track.sample_ids, "draws": self._config.num_points, "device": x0.device}
        sigma, noise = forward_sigmas(**where), forward_noise(**where, shape=x0.shape[1:])
        x = noised(x0[:, None], noise, sigma)
        velocity = forward.velocity(track, x, sigma, guided=True)
        inverts = torch.tensor([self._inverts(draw) for draw in range(self._config.num_points)], device=x0.device)
        after = torch.where(inverts, sigma + self._config.step, (sigma - self._config.step).clamp(min=0))
        return Estimates(latents=direct_align(x, velocity, noise, sigma=sigma, sigma_next=after).unbind(dim=1))

    def score_of(self, draw: int) -> GradientScore:
        if not self._config.inversion_points:
            return self.score
        return self._penalty if self._inverts(draw) else self._reward_alone

    def score(self, track: Track, media: Tensor) -> Tensor:
        """The reward with the positive phrase less that with the negative one."""
        reward = self._reward_alone(track, media)
        if not self._config.negative:
            return reward
        negative = super().score(_worded(track, self._config.negative), media)
        self._check_wording(track, reward - negative)
        return reward - negative

    def _reward_alone(self, track: Track, media: Tensor) -> Tensor:
        return super().score(_worded(track, self._config.positive), media)

    def _penalty(self, track: Track, media: Tensor) -> Tensor:
        """The reward with the negative phrase, which rises towards noise and so falls in samples."""
        negative = super().score(_worded(track, self._config.negative), media)
        with torch.no_grad():
            self._check_wording(track, self._reward_alone(track, media) - negative)
        return negative

    def _inverts(self, draw: int) -> bool:
        # Draws rise in noise.
        return draw < self._config.inversion_points

    def _check_wording(self, track: Track, difference: Tensor) -> None:
        config = self._config
        counted = track.sample_weights.to(difference.device) > 0
        if bool((difference[counted] == 0).all()) and bool(counted.any()):
            raise RewardFailed(
                f"reward: got equal scores for prompts that begin with {config.positive!r} and with "
                f"{config.negative!r} (algorithm.positive, algorithm.negative) on all samples, expected a reward that "
                "reads the prompt, such as pickscore or hpsv2. Use one, or algorithm.negative=''."
            )


def _worded(track: Track, phrase: str) -> Track:
    """The track with a phrase before each prompt, for rewards; the model's conditions are as they were."""
    if not phrase:
        return track
    inputs = track.inputs
    # Rows of one id share their prompt.
    inputs = dataclasses.replace(
        inputs,
        ids=tuple(f"{phrase} {one}" for one in inputs.ids),
        prompts=tuple(f"{phrase} {prompt}" for prompt in inputs.prompts),
    )
    return dataclasses.replace(track, inputs=inputs)


build = Srpo.build
