"""A forward of the training model over a track, as algorithms see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..types.array import Array

if TYPE_CHECKING:
    from ..types.track import Track
    from .model import DivergenceKind

__all__ = ["Forward", "Policy", "Replayed", "ReplayedTokens"]

Policy = Literal["live", "reference", "ema", "lagged", "fake"]
"""Which weights a forward uses: those that train, the initial ones, their average, the lagged policy, or the fake score
(see `Algorithm`)."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The transitions of n rows at S stored steps; losses take everything from here and recompute nothing."""

    log_probs: Array
    """[n, S] fp32 of the stored next latents, with gradient; 0 where not valid."""
    means: Array
    """[n, S, ...] fp32, with gradient."""
    std: Array
    """[n, S, 1, ...] fp32 std of the transitions."""
    g: Array
    """[n, S, 1, ...] fp32 diffusion coefficients."""
    next: Array
    """[n, S, ...] fp32.  The stored latents after each step."""
    valid: Array
    """[n, S] bool.  False where a row has fewer steps than others; such entries weigh nothing."""


@dataclass(frozen=True, kw_only=True)
class ReplayedTokens:
    """The tokens of n rows, S the longest text of them; losses take everything from here and recompute nothing."""

    log_probs: Array
    """[n, S] fp32 at the temperature of the rollout, with gradient; 0 where not valid."""
    entropy: Array | None
    """[n, S] fp32 in nats, of the distribution that each token was drawn from, with gradient; 0 where not valid."""
    valid: Array
    """[n, S] bool. False past the end of a text, and for tokens that are not trained on."""
    divergence: Array | None = None
    """[n, S] fp32 in nats, between the distributions that a token was drawn from and a teacher's, with gradient; 0
    where not valid. Only of `Forward.divergence`."""


class Forward(Protocol):
    """The policy as a loss uses it: a replay, the velocity at any point, and decoding.

    With gradient for the policy `live`, in a loss of the fake score for `fake` alone, unless in no_grad; without for
    every other policy. Ranks that train together must ask equally often, with equally many columns of points.
    """

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        """Recompute the stored transitions of a latent track, or the log-probs of a text track's tokens."""
        ...

    def velocity(self, track: Track, x: Array, sigma: Array, *, policy: Policy = "live", guided: bool = False) -> Array:
        """Velocity x1 - x0 at any points, under the track's conditions. Returns fp32 in the shape of x.

        x: [n, ...] with sigma [n], or [n, k, ...] with sigma [n, k]: k points of each of the n rows.
        guided: with the guidance that the track was sampled with; without it the positive conditions alone.
        Raises BatchError for a track that is not latent, and for shapes that do not fit its rows.
        """
        ...

    def divergence(
        self,
        track: Track,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        top_k: int | None = None,
        policy: Policy = "reference",
    ) -> ReplayedTokens:
        """Divergence of the live policy from another one over the whole vocabulary, at each token of a text track.

        kind, beta, top_k: see `TextModel.divergence`.  policy: the teacher.
        Returns log-probs without gradient, and no entropy. Raises BatchError for a track that is not text, for models
        that are not compared, and where only the teacher's log-probs of the sampled tokens are available.
        """
        ...

    def decode(self, track: Track, latents: Array) -> Array:
        """Media of clean latents [n, ...] of the track's rows, as `DiffusionModel.decode` gives them.

        Keeps the gradient with respect to the latents. Raises BatchError for a track that is not latent.
        """
        ...
