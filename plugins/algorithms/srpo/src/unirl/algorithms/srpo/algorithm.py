"""SRPO: the gradient of relative rewards through one step from noised clean latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from unirl.algorithms.srpo.config import SrpoConfig
from unirl.core.errors import RewardFailed
from unirl.core.roles import Forward
from unirl.core.types.track import Track
from unirl.numerics.forward_process import direct_align, forward_noise, forward_sigmas, noised
from unirl.numerics.train.reward_gradient import Estimates, RewardGradient

__all__ = ["Srpo", "build"]


class Srpo(RewardGradient):
    """Direct-Align with semantic relative preferences, arXiv 2509.06942, from the paper.

    Clean latents are noised with known noise, the model takes one step from there, and the same noise leads back to a
    clean estimate that is exact where the velocity is: every noise level gets a gradient through a single step. The
    reward of a prompt with a negative phrase may be subtracted from that with a positive one. The paper's inversion,
    which steps towards noise and lowers the reward, is not included.
    """

    def __init__(self, config: SrpoConfig, **context: Any) -> None:
        super().__init__(config, **context)
        self._config = config

    @property
    def draw_weights(self) -> Sequence[float]:
        # Draws rise in noise.
        count = self._config.num_points
        return tuple(self._config.discount ** (count - 1 - number) for number in range(count))

    def estimates(self, track: Track, forward: Forward) -> Estimates:
        x0 = track.latent.final.float()
        where = {"seed": self.seed, "ids": track.sample_ids, "draws": self._config.num_points, "device": x0.device}
        sigma, noise = forward_sigmas(**where), forward_noise(**where, shape=x0.shape[1:])
        x = noised(x0[:, None], noise, sigma)
        velocity = forward.velocity(track, x, sigma, guided=True)
        after = (sigma - self._config.step).clamp(min=0)
        return Estimates(latents=direct_align(x, velocity, noise, sigma=sigma, sigma_next=after).unbind(dim=1))

    def score(self, track: Track, media: Tensor) -> Tensor:
        """The reward with the positive phrase less that with the negative one."""
        config = self._config
        reward = super().score(_worded(track, config.positive), media)
        if not config.negative:
            return reward
        difference = reward - super().score(_worded(track, config.negative), media)
        counted = track.sample_weights.to(difference.device) > 0
        if bool((difference[counted] == 0).all()) and bool(counted.any()):
            raise RewardFailed(
                f"reward: got equal scores for prompts that begin with {config.positive!r} and with "
                f"{config.negative!r} (algorithm.positive, algorithm.negative) on all samples, expected a reward that "
                "reads the prompt, such as pickscore or hpsv2. Use one, or algorithm.negative=''."
            )
        return difference


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
