"""Forwards that call another one, and change one thing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.track import TextSegment

if TYPE_CHECKING:
    from unirl.core.roles import DivergenceKind, Forward, Policy
    from unirl.core.types.track import Track

__all__ = ["ForwardWrapper", "ReplayedOnce"]


class ForwardWrapper:
    """Base: answers as the other one does. Implements `unirl.core.roles.Forward`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @property
    def wrapped(self) -> Forward:
        """The forward within all wrappers."""
        return self._forward.wrapped if isinstance(self._forward, ForwardWrapper) else self._forward

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        return self._forward(track, policy=policy)

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        return self._forward.velocity(track, x, sigma, policy=policy, guided=guided)

    def divergence(
        self,
        track: Track,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        top_k: int | None = None,
        policy: Policy = "reference",
    ) -> ReplayedTokens:
        return self._forward.divergence(track, kind=kind, beta=beta, top_k=top_k, policy=policy)

    def decode(self, track: Track, latents: Tensor) -> Tensor:
        return self._forward.decode(track, latents)


class ReplayedOnce(ForwardWrapper):
    """For the samples of one track: their replay by the live policy is computed once, with gradient, also where it is
    first asked for without."""

    def __init__(self, forward: Forward, track: Track) -> None:
        super().__init__(forward)
        self._track = track
        self._live: Replayed | ReplayedTokens | None = None

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        if policy != "live" or not self._has_samples_of(track):
            return self._forward(track, policy=policy)
        if self._live is None:
            with torch.enable_grad():
                self._live = self._forward(track)
        return self._live if torch.is_grad_enabled() else _detached(self._live)

    def _has_samples_of(self, track: Track) -> bool:
        """Whether its samples are those of the track, whatever an algorithm has filled in since."""
        (one, steps), (other, others) = (_samples(each) for each in (self._track, track))
        return one is other and steps is others


def _samples(track: Track) -> tuple[object, object]:
    """What is replayed, and at which steps."""
    if isinstance(track.segment, TextSegment):
        return track.segment.tokens, None
    return track.latent.latents, track.latent.scored_steps


def _detached(replayed: Replayed | ReplayedTokens) -> Replayed | ReplayedTokens:
    values = {item.name: getattr(replayed, item.name) for item in dataclasses.fields(replayed)}
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(replayed, **tensors)
