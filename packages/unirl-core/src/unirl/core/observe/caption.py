"""Captions of samples, prompt, reward and truncation of each in one line; and episodes as text."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import TYPE_CHECKING

from ..roles.environment import RETURN
from ..types.track import Status

if TYPE_CHECKING:
    from ..types.inputs import Turn
    from ..types.track import Track

__all__ = ["captions", "transcript"]


def captions(track: Track) -> list[str]:
    """`<prompt> | reward 0.50 | truncated` of each sample: without the reward where it has none, and without the last
    word unless a length limit ended it."""
    result: list[str] = []
    for row, (prompt, status) in enumerate(zip(track.inputs.prompts, track.status, strict=True)):
        value = None if track.rewards is None else float(track.rewards[row])
        reward = "" if value is None else " | no score" if isnan(value) else f" | reward {value:.2f}"
        result.append(f"{prompt}{reward}{' | truncated' if status is Status.TRUNCATED else ''}")
    return result


def transcript(turns: Iterable[Turn]) -> str:
    """An episode as text: its answers, and every line of the environment behind `> `."""
    return "\n".join(
        "\n".join(f"> {line}" for line in turn.text.splitlines()) if turn.stage == RETURN else turn.text
        for turn in turns
    )
