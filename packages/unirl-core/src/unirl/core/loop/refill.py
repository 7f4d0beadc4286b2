"""Groups whose samples all got one reward teach nothing: they are left out, and others are drawn in their place.

Source: dynamic sampling of DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RewardFailed

if TYPE_CHECKING:
    from ..types.data import Prompt
    from ..types.track import Track

__all__ = ["Drawn", "Refill", "groups_with_spread"]

LEAST_SHARE = 0.125
"""A round draws as many prompts as it takes at the share of useful groups so far, and never as for a lower one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Which rows of everything that was drawn are trained on."""

    rows: tuple[int, ...]
    num_groups: int
    """Groups that were drawn."""
    num_without_spread: int
    """Groups among them whose samples all got one reward."""
    num_missing: int
    """Groups that the step should have and has not."""


class Refill:
    """Draws groups for one step until it has as many with spread as it wants, or no more may be drawn."""

    def __init__(self, *, wanted: int, rounds: int, spare: Sequence[Prompt]) -> None:
        """wanted: groups of the step.  rounds: that may be drawn after the first.  spare: prompts that it has not."""
        self._wanted, self._rounds, self._spare = wanted, rounds, list(spare)

    def run(self, first: Track, draw: Callable[[Sequence[Prompt]], Track]) -> Drawn:
        """first: what the step's own prompts gave, scored.  draw: the scored samples of further prompts.

        Raises RewardFailed when no group at all has spread.
        """
        groups = [first.groups()]
        useful = [groups_with_spread(first)]
        start, at = first.num_rows, [0]
        for _ in range(self._rounds):
            drawn, kept = sum(map(len, groups)), sum(map(len, useful))
            missing = self._wanted - kept
            count = min(math.ceil(missing / max(kept / drawn, LEAST_SHARE)), self._wanted, len(self._spare))
            if missing <= 0 or not count:
                break
            prompts, self._spare = self._spare[:count], self._spare[count:]
            track = draw(prompts)
            groups.append(track.groups())
            useful.append(groups_with_spread(track))
            at.append(start)
            start += track.num_rows
        result = [[row + offset for row in rows] for offset, there in zip(at, useful, strict=True) for rows in there]
        drawn = sum(map(len, groups))
        if not result:
            raise RewardFailed(
                f"data.dynamic_sampling_rounds: none of the {drawn} groups drawn in {len(groups)} rounds has samples "
                "with different rewards, so there is nothing to learn from. Look at the samples and the reward: the "
                "prompts may be far too easy or too hard; more samples_per_prompt help as well."
            )
        return Drawn(
            rows=tuple(row for rows in result[: self._wanted] for row in rows),
            num_groups=drawn,
            num_without_spread=drawn - len(result),
            num_missing=max(0, self._wanted - len(result)),
        )


def groups_with_spread(track: Track) -> list[list[int]]:
    """Rows of each group that has two samples of different reward, in order of first appearance."""
    assert track.rewards is not None
    rewards = [float(reward) for reward in track.rewards]
    return [rows for rows in track.groups().values() if len({rewards[row] for row in rows}) > 1]
