"""Groups whose samples all got one reward teach nothing: they are left out, and others are drawn in their place.

With several stages a group is that of a prompt, with all samples that go back to it: they stay or go together. It stays
while one stage that trains has samples to compare in it that differ in reward, credit included.

Source: dynamic sampling of DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from unirl.core.errors import RewardFailed

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage
    from unirl.core.types.data import Prompt
    from unirl.core.types.track import Track

__all__ = ["Drawn", "Refill", "prompt_groups", "with_spread"]

LEAST_SHARE = 0.125
"""A round draws as many prompts as it takes at the share of useful groups so far, and never as for a lower one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Which rows of everything that was drawn are trained on."""

    rows: Mapping[str, tuple[int, ...]]
    """Of each track."""
    num_groups: int
    """Groups that were drawn."""
    num_without_spread: int
    """Groups among them whose samples all got one reward."""
    num_missing: int
    """Groups that the step should have and has not."""


class Refill:
    """Draws groups for one step until it has as many with spread as it wants, or no more may be drawn."""

    def __init__(self, *, wanted: int, rounds: int, spare: Sequence[Prompt], stages: Sequence[Stage]) -> None:
        """wanted: groups of the step.  rounds: that may be drawn after the first.  spare: prompts that it has not.

        stages: parents first.
        """
        self._wanted, self._rounds, self._spare, self._stages = wanted, rounds, list(spare), stages

    def run(self, first: Mapping[str, Track], draw: Callable[[Sequence[Prompt]], Mapping[str, Track]]) -> Drawn:
        """first: tracks of the step's own prompts, scored.  draw: the scored tracks of further prompts.

        Raises RewardFailed when no group at all has spread.
        """
        made = [first]
        groups = [prompt_groups(first, self._stages)]
        useful = [with_spread(first, groups[0], self._stages)]
        for _ in range(self._rounds):
            drawn, kept = sum(map(len, groups)), sum(map(len, useful))
            missing = self._wanted - kept
            count = min(math.ceil(missing / max(kept / drawn, LEAST_SHARE)), self._wanted, len(self._spare))
            if missing <= 0 or not count:
                break
            prompts, self._spare = self._spare[:count], self._spare[count:]
            made.append(draw(prompts))
            groups.append(prompt_groups(made[-1], self._stages))
            useful.append(with_spread(made[-1], groups[-1], self._stages))
        result = [(number, group) for number, names in enumerate(useful) for group in names]
        drawn = sum(map(len, groups))
        if not result:
            raise RewardFailed(
                f"data.dynamic_sampling_rounds: none of the {drawn} groups drawn in {len(groups)} rounds has samples "
                "with different rewards, so there is nothing to learn from. Look at the samples and the reward: the "
                "prompts may be far too easy or too hard; more samples_per_prompt help as well."
            )
        rows: dict[str, tuple[int, ...]] = {}
        for name in first:
            start = list(accumulate((tracks[name].num_rows for tracks in made), initial=0))
            rows[name] = tuple(
                start[number] + row for number, group in result[: self._wanted] for row in groups[number][group][name]
            )
        return Drawn(
            rows=rows,
            num_groups=drawn,
            num_without_spread=drawn - len(result),
            num_missing=max(0, self._wanted - len(result)),
        )


def prompt_groups(tracks: Mapping[str, Track], stages: Sequence[Stage]) -> dict[str, dict[str, list[int]]]:
    """Group of a prompt -> track -> its rows there, in order of first appearance.  stages: parents first."""
    result: dict[str, dict[str, list[int]]] = {}
    root_of: dict[str, str] = {}
    """Sample -> the group of the prompt that it goes back to."""
    for stage in stages:
        track = tracks[stage.name]
        parents = cast("tuple[str, ...]", track.parent_ids)
        roots = track.group_ids if stage.parent is None else [root_of[parent] for parent in parents]
        root_of |= zip(track.sample_ids, roots, strict=True)
        for row, root in enumerate(roots):
            result.setdefault(root, {name: [] for name in tracks})[stage.name].append(row)
    return result


def with_spread(
    tracks: Mapping[str, Track], groups: Mapping[str, Mapping[str, Sequence[int]]], stages: Sequence[Stage]
) -> list[str]:
    """Groups of prompts in which a stage that trains compares two samples of different reward.

    Rewards include credit; samples of weight 0 do not count.
    """
    trained = [tracks[stage.name] for stage in stages if stage.algorithm is not None]
    return [name for name, rows in groups.items() if any(_has_spread(track, rows[track.name]) for track in trained)]


def _has_spread(track: Track, rows: Sequence[int]) -> bool:
    if track.rewards is None:
        return False
    rewards: dict[str, set[float]] = {}
    for row in rows:
        if float(track.sample_weights[row]) > 0:
            rewards.setdefault(track.group_ids[row], set()).add(float(track.rewards[row]))
    return any(len(values) > 1 for values in rewards.values())
