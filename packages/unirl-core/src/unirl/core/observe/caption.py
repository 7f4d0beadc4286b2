"""Captions of samples: prompt, reward and truncation of each in one line."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from ..types.track import Status

if TYPE_CHECKING:
    from ..types.track import Track

__all__ = ["captions"]


def captions(track: Track) -> list[str]:
    """`<prompt> | reward 0.50 | truncated` of each sample: without the reward where it has none, and without the last
    word unless a length limit ended it."""
    result: list[str] = []
    for row, (prompt, status) in enumerate(zip(track.inputs.prompts, track.status, strict=True)):
        value = None if track.rewards is None else float(track.rewards[row])
        reward = "" if value is None else " | no score" if isnan(value) else f" | reward {value:.2f}"
        result.append(f"{prompt}{reward}{' | truncated' if status is Status.TRUNCATED else ''}")
    return result
