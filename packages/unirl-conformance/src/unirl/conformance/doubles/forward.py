"""A `Forward` that answers as another one does."""

from __future__ import annotations

from torch import Tensor
from unirl.core.roles import DivergenceKind, Forward, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Track

__all__ = ["ForwardWrapper"]


class ForwardWrapper:
    """Base of those that change or watch one thing. Fits `unirl.core.roles.Forward`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

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
