"""Replay of a track: everything that determines its log-probs is read from the track itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.track import TextSegment

from ..diffusion.replay import replay
from ..diffusion.sampler import guidance_of, kernel_of
from ..tokens.replay import replay_text
from .reference import kept_reference_tokens

if TYPE_CHECKING:
    from unirl.core.roles import DiffusionModel, Model, Policy, TextModel
    from unirl.core.types.track import Track

__all__ = ["TrackReplay"]


class TrackReplay:
    """Recomputes the log-probs of a track with the model being trained. Implements `unirl.core.roles.Replay`.

    Kernel, sigmas, SDE steps and guidance of latent tracks, and the temperature of text tracks, are read from the
    segment, which the engine echoed: there is no second setting that could differ.
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

        packing: pack completions without padding, if the model can.
        """
        self._model = model
        self._stacked, self._packing = stacked, packing
        self._policy_context = policy_context

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        """log_probs [n, S] and the transitions of every scored step; or of every token, with the entropies.

        With gradient for `live`, unless the caller is in no_grad; without for every other policy. Outputs of the
        reference policy that are stored in the track (`unirl.numerics.train.reference`) are used as they are.

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
                raise BatchError(f"Track {track.name!r}: it is a text track, but the trained model is not a TextModel.")
            return replay_text(cast("TextModel", self._model), track.segment, packing=self._packing)
        return self._latents(track)

    def _latents(self, track: Track, *, means: Tensor | None = None) -> Replayed:
        segment = track.latent
        return replay(
            cast("DiffusionModel", self._model).velocity,
            latents=segment.latents,
            positions=segment.positions,
            sigmas=segment.sigmas,
            sde_steps=segment.scored_steps,
            kernel=kernel_of(segment.sampler),
            conditions=track.conditions["positive"].expanded(),
            negatives=track.conditions["negative"].expanded() if "negative" in track.conditions else None,
            guidance=guidance_of(segment.sampler, latent_rank=segment.latents.ndim - 1),
            stacked=self._stacked,
            means=means,
        )
