"""Old log-probs, weights and velocity distances of the scored steps of latent tracks, shared by policy losses."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Forward, Replayed
from unirl.core.types.track import LatentSegment, Track

from ..diffusion.sampler import kernel_of
from ..loss.losses import mean_shift_squared

__all__ = ["StepLosses", "old_log_prob_steps", "step_counts", "velocity_gain", "velocity_shift_squared"]

BY_STEP = ("log_probs", "means", "reference_means", "values", "returns", "advantages")
"""Fields of a `LatentSegment` with an entry for each scored step."""


class StepLosses:
    """For an `unirl.core.roles.Algorithm` whose losses are sums over the scored steps of a sample."""

    separates_steps = True

    def pieces(self, track: Track) -> list[Track]:
        """See `unirl.core.roles.Algorithm`. The parts share their latents."""
        segment = track.latent
        filled = {name: value for name in BY_STEP if (value := getattr(segment, name)) is not None}

        def piece(column: slice) -> Track:
            fields = {name: value[:, column] for name, value in filled.items()}
            part = dataclasses.replace(segment, train_steps=segment.scored_steps[:, column], **fields)
            return dataclasses.replace(track, segment=part)

        return [piece(slice(number, number + 1)) for number in range(segment.scored_steps.shape[1])]


def step_counts(track: Track) -> Tensor:
    """[n, R]: the sample's weight where a row has a scored step, else 0."""
    return track.sample_weights[:, None] * (track.latent.scored_steps >= 0)


def old_log_prob_steps(track: Track, forward: Forward, *, replays: bool) -> Track:
    """Store the old log-probs of a latent track: recomputed ones, exactly as in the update, or the engine's.

    Raises BatchError if the engine's are needed and missing.
    """
    if not replays:
        if track.latent.log_probs is None:
            raise BatchError(
                f"LatentSegment.log_probs: the engine's log-probs are needed, but track {track.name!r} came without "
                "them. Use an engine that returns them, or train.old_log_probs=replay."
            )
        return track
    with torch.no_grad():
        old = forward(track).log_probs.detach()
    return dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=old))


def velocity_gain(segment: LatentSegment) -> Tensor:
    """[n, R] fp32: c of each scored step, the derivative of its mean by the velocity; 1 where a row has none.

    A step's mean is a x + c v for every kernel that has a density, so the means of two velocities at the same latent
    differ by c times the difference of the velocities. Signed: c < 0 for flow models.
    """
    steps = segment.scored_steps
    at = steps.clamp(min=0)
    sigmas = segment.sigmas.to(device=at.device, dtype=torch.float32)
    sigma, sigma_next = sigmas[at].flatten(), sigmas[at + 1].flatten()
    zero = sigma.new_zeros((len(sigma), 1))

    def mean(velocity: Tensor) -> Tensor:
        return (
            kernel_of(segment.sampler)
            .transition(zero, velocity=velocity, sigma=sigma, sigma_next=sigma_next, sigma_max=sigmas[1])
            .mean
        )

    gain = (mean(zero + 1) - mean(zero)).view(steps.shape)
    return torch.where(steps >= 0, gain, 1.0)


def velocity_shift_squared(segment: LatentSegment, new: Replayed, other: Replayed) -> Tensor:
    """[n, R]: squared distance of the guided velocities of two policies at the stored latents, averaged over elements.

    new, other: replays of these rows. The velocities are not needed: it is the distance of the means over c^2, see
    `velocity_gain`. With the std s of a step, c^2 / (2 s^2) times it is the step's Gaussian KL.
    """
    shift = mean_shift_squared(new.means, other.means)
    return shift / velocity_gain(segment).to(shift).square()
