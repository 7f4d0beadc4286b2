"""Replay of a track: everything that decides its log-probs is read from the track itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.track import TextSegment

from .kernels import make_kernel
from .latent_rollout import guidance_of
from .reference import kept_reference_tokens
from .replay import Replayed, replay
from .text_replay import ReplayedTokens, replay_text

if TYPE_CHECKING:
    from unirl.core.roles import DiffusionModel, Model, Policy, TextModel
    from unirl.core.track import Track

__all__ = ["TrackReplay"]


class TrackReplay:
    """Recomputes the log-probs of a track with the model that trains. Fits `unirl.core.roles.Replay`.

    Kernel, sigmas, SDE steps and guidance of latent tracks, and the temperature of text, come from the track's segment,
    which is what the engine echoed: there is no second setting that could differ.
    """

    def __init__(
        self,
        model: Model,
        *,
        stacked: bool,
        policy_context: Callable[[Policy], AbstractContextManager[None]],
        packing: bool = True,
    ) -> None:
        """stacked: all SDE steps in one forward, or one after the other.  policy_context: `Backend.policy`.

        packing: texts after each other without padding, where the model can.
        """
        self._model = model
        self._stacked, self._packing = stacked, packing
        self._policy_context = policy_context

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        """log_probs [n, S] and the transitions of every stored SDE step; or of every token, with the entropies.

        With gradient for `live`, unless the caller is in no_grad; without for every other policy. What a track brings
        of its reference policy (`unirl.numerics.reference`) is taken from there.

        Raises BatchError when the track has no segment, ValueError when its latents are not stored.
        """
        if policy == "live":
            return self._replayed(track)
        kept = self._kept_reference(track) if policy == "reference" else None
        if kept is not None:
            return kept
        with torch.no_grad(), self._policy_context(policy):
            return self._replayed(track)

    def _kept_reference(self, track: Track) -> Replayed | ReplayedTokens | None:
        if isinstance(track.segment, TextSegment):
            return kept_reference_tokens(track.segment)
        means = track.latent.reference_means
        return None if means is None else self._latents(track, means=means)

    def _replayed(self, track: Track) -> Replayed | ReplayedTokens:
        if isinstance(track.segment, TextSegment):
            if not hasattr(self._model, "score"):
                raise BatchError(f"Track {track.name!r}: it is text, and the model that trains decodes no tokens.")
            return replay_text(cast("TextModel", self._model), track.segment, packing=self._packing)
        return self._latents(track)

    def _latents(self, track: Track, *, means: Tensor | None = None) -> Replayed:
        segment = track.latent
        return replay(
            cast("DiffusionModel", self._model).velocity,
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
            means=means,
        )
