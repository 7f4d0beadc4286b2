"""Reward of `quickstart-vl`, in the calling convention of the reward `function`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["color_and_shape"]


def color_and_shape(completions: Sequence[str], color: Sequence[str], shape: Sequence[str]) -> list[float]:
    """Half for the right colour as the first word, half for the right shape as the second; 0 unless there are two."""
    scores: list[float] = []
    for completion, *answer in zip(completions, color, shape, strict=True):
        words = completion.split()
        hits = [word == fact for word, fact in zip(words, answer, strict=False)]
        scores.append(sum(hits) / 2 if len(words) == 2 else 0.0)
    return scores
