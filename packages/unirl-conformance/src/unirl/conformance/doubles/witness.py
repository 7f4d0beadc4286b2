"""An algorithm that does what another one does, and notes what it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor
from unirl.core.roles import Algorithm, Forward, Losses, Metric, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Track

from .forward import SameForward
from .track_numbers import log_probs_of

__all__ = ["CriticWitness", "Witness", "witness"]


def witness(algorithm: Algorithm) -> Witness:
    """Of an algorithm with a critic, or without."""
    return CriticWitness(algorithm) if algorithm.trains_critic else Witness(algorithm)


class Witness(Algorithm):
    """An algorithm that does what another one does, and notes what it was given. Fits `unirl.core.roles.Algorithm`."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.gaps: list[float] = []
        """Largest |log-prob of the engine - of the replay| of each old-log-prob pass, in the order of the rounds."""
        self.log_ratios: list[float] = []
        """Largest |log-prob - old log-prob| of each forward of a loss, in their order."""

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return self._algorithm.advantages(track)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        log_probs = log_probs_of(track)
        if log_probs is not None:
            self.gaps.append(_largest(forward(track), log_probs))
        return self._algorithm.with_old_log_probs(track, forward)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return self._algorithm.loss_weights(track)

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return self._algorithm.loss(track, _Watched(forward, self.log_ratios), progress=progress)


class _Watched(SameForward):
    """Notes the largest log-ratio of each live replay."""

    def __init__(self, forward: Forward, log_ratios: list[float]) -> None:
        super().__init__(forward)
        self._log_ratios = log_ratios

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        replayed = super().__call__(track, policy=policy)
        log_probs = log_probs_of(track)
        if policy == "live" and log_probs is not None:
            self._log_ratios.append(_largest(replayed, log_probs))
        return replayed


class CriticWitness(Witness):
    """The same for an algorithm with a critic."""

    trains_critic = True

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._judge = algorithm

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        return self._judge.after_anchor(track, sum_over_ranks)

    def critic_weights(self, track: Track) -> Mapping[str, Tensor]:
        return self._judge.critic_weights(track)

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        return self._judge.critic_loss(track, values, progress=progress)


def _largest(replayed: Replayed | ReplayedTokens, log_probs: Tensor) -> float:
    gap = (cast(Tensor, replayed.log_probs).detach() - log_probs).abs()[cast(Tensor, replayed.valid)]
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0
