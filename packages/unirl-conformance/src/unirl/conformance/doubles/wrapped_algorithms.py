"""Algorithms that call another one, and change or record one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Forward, Losses, Metric, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Track
from unirl.numerics.train.actions import per_action, with_per_action
from unirl.numerics.train.forwards import ForwardWrapper

from .track_numbers import log_probs_of

__all__ = ["AlgorithmWrapper", "KeepsOldLogProbs", "LogProbRecorder"]


class AlgorithmWrapper(Algorithm):
    """Base: calls the other algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.trains_critic = algorithm.trains_critic
        self.after_anchor, self.critic_weights = algorithm.after_anchor, algorithm.critic_weights
        self.critic_loss = algorithm.critic_loss
        self.trains_fake_score = algorithm.trains_fake_score
        self.fake_score_weights, self.fake_score_loss = algorithm.fake_score_weights, algorithm.fake_score_loss
        self.separates_steps, self.pieces = algorithm.separates_steps, algorithm.pieces

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return self._algorithm.advantages(track)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return self._algorithm.with_old_log_probs(track, forward)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        return self._algorithm.loss_weights(track)

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return self._algorithm.loss(track, forward, progress=progress)


class KeepsOldLogProbs(AlgorithmWrapper):
    """Keeps the old log-probs and values of a track, so that the stack can train with weights that moved since."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._values: dict[str, Tensor] = {}
        if algorithm.trains_critic:
            self.after_anchor = self._with_old_values

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        if track.segment is not None and track.segment.values is not None:
            # Rows of other micro-batches may be longer.
            self._values.update(zip(track.sample_ids, per_action(track, "values"), strict=True))
        return track

    def _with_old_values(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """The stack has asked the critic once more, after it moved."""
        rows = [self._values[name] for name in track.sample_ids]
        return with_per_action(track, values=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)), {}


class LogProbRecorder(AlgorithmWrapper):
    """Records how far apart log-probs are."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self.gaps: list[float] = []
        """Largest |log-prob of the engine - of the replay| of each old-log-prob pass, in the order of the rounds."""
        self.log_ratios: list[float] = []
        """Largest |log-prob - old log-prob| of each live forward of a loss, in their order."""

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        log_probs = log_probs_of(track)
        if log_probs is not None:
            self.gaps.append(_largest_gap(forward(track), log_probs))
        return super().with_old_log_probs(track, forward)

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        return super().loss(track, _Recording(forward, self.log_ratios), progress=progress)


class _Recording(ForwardWrapper):
    """Records the largest log-ratio of each live replay."""

    def __init__(self, forward: Forward, log_ratios: list[float]) -> None:
        super().__init__(forward)
        self._log_ratios = log_ratios

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        replayed = super().__call__(track, policy=policy)
        log_probs = log_probs_of(track)
        if policy == "live" and log_probs is not None:
            self._log_ratios.append(_largest_gap(replayed, log_probs))
        return replayed


def _largest_gap(replayed: Replayed | ReplayedTokens, log_probs: Tensor) -> float:
    gap = (replayed.log_probs.detach() - log_probs).abs()[replayed.valid]
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0
