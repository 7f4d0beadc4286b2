"""Replay of a latent track: everything that decides the transitions is read from the track itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from .kernels import make_kernel
from .latent_rollout import guidance_of
from .replay import Replayed, replay

if TYPE_CHECKING:
    from unirl.core.roles import DiffusionModel, Policy
    from unirl.core.track import Track

__all__ = ["TrackReplay"]


class TrackReplay:
    """Recomputes the transitions of a track with the model that trains. Fits `unirl.core.roles.Replay`.

    Kernel, sigmas, SDE steps and guidance come from the track's segment, which is what the engine echoed: there is no
    second setting that could differ.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        stacked: bool,
        policy_context: Callable[[Policy], AbstractContextManager[None]],
    ) -> None:
        """stacked: all SDE steps in one forward, or one after the other.  policy_context: `Backend.policy`."""
        self._model = model
        self._stacked = stacked
        self._policy_context = policy_context

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed:
        """log_probs [n, S] and the transitions of every stored SDE step.

        With gradient for `live`, unless the caller is in no_grad; without for every other policy.

        Raises BatchError when the track is no latent track, ValueError when its latents are not stored.
        """
        if policy == "live":
            return self._replayed(track)
        with torch.no_grad(), self._policy_context(policy):
            return self._replayed(track)

    def _replayed(self, track: Track) -> Replayed:
        segment = track.latent
        return replay(
            self._model.velocity,
            latents=segment.latents,
            positions=segment.positions,
            sigmas=segment.sigmas,
            sde_steps=segment.sde_steps,
            kernel=make_kernel(segment.kernel.name, eta=segment.kernel.eta, **dict(segment.kernel.options)),
            conditions=track.conditions["positive"].expanded(),
            negatives=track.conditions["negative"].expanded() if "negative" in track.conditions else None,
            guidance=guidance_of(
                scale=segment.guidance_scale, mode=segment.guidance_mode, latent_rank=segment.latents.ndim - 1
            ),
            stacked=self._stacked,
        )
