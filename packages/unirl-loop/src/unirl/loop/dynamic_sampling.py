"""Dynamic sampling: zero-variance groups are replaced by groups of further prompts.

With several stages a group is that of a prompt, with all samples that descend from it: they stay or go together. It
stays while one stage that trains has samples to compare in it that differ in reward, credit included.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from unirl.core.errors import RewardFailed
from unirl.core.types.track import Track

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

__all__ = ["Drawn", "UsefulGroups", "prompt_groups", "with_spread"]

LEAST_SHARE = 0.125
"""A round draws as many prompts as it takes at the share of useful groups so far, and never as for a lower one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Numbers of the groups that a step was filled from."""

    num_groups: int
    """Groups that were drawn."""
    num_without_spread: int
    """Zero-variance groups among them."""
    num_missing: int
    """Groups that the step lacks."""


class UsefulGroups:
    """Collects groups with spread for one step, round by round."""

    def __init__(self, stages: Sequence[Stage], *, wanted: int) -> None:
        """stages: parents first.  wanted: groups of the step."""
        self._stages, self._wanted = stages, wanted
        self._rounds: list[Mapping[str, Track]] = []
        self._groups: list[Mapping[str, Mapping[str, Sequence[int]]]] = []
        self._useful: list[list[str]] = []

    def num_to_draw(self, num_left: int) -> int:
        """How many prompts to draw after the first round; 0 when the step is full or no prompt is left."""
        missing = self._wanted - self._num_useful
        share = max(self._num_useful / self._num_drawn, LEAST_SHARE)
        return max(0, min(math.ceil(missing / share), self._wanted, num_left))

    def add(self, tracks: Mapping[str, Track]) -> None:
        """Take the scored tracks of a round."""
        groups = prompt_groups(tracks, self._stages)
        self._rounds.append(tracks)
        self._groups.append(groups)
        self._useful.append(with_spread(tracks, groups, self._stages))

    def chosen(self) -> tuple[dict[str, Track], Drawn]:
        """The tracks of the step: the first useful groups, in the order in which they were drawn.

        Raises RewardFailed when no group at all has spread.
        """
        result = [(number, group) for number, names in enumerate(self._useful) for group in names]
        if not result:
            raise RewardFailed(
                f"data.dynamic_sampling_rounds: none of the {self._num_drawn} groups drawn in {len(self._rounds)} "
                "rounds has samples with different rewards, so there is nothing to learn from. Look at the samples and "
                "the reward: the prompts may be far too easy or too hard; more samples_per_prompt help as well."
            )
        tracks: dict[str, Track] = {}
        for name in self._rounds[0]:
            start = list(accumulate((tracks[name].num_rows for tracks in self._rounds), initial=0))
            rows = [
                start[number] + row
                for number, group in result[: self._wanted]
                for row in self._groups[number][group][name]
            ]
            tracks[name] = Track.concat([each[name] for each in self._rounds]).select(rows)
        drawn = Drawn(
            num_groups=self._num_drawn,
            num_without_spread=self._num_drawn - len(result),
            num_missing=max(0, self._wanted - len(result)),
        )
        return tracks, drawn

    @property
    def _num_drawn(self) -> int:
        return sum(map(len, self._groups))

    @property
    def _num_useful(self) -> int:
        return sum(map(len, self._useful))


def prompt_groups(tracks: Mapping[str, Track], stages: Sequence[Stage]) -> dict[str, dict[str, list[int]]]:
    """Group of a prompt -> track -> its rows there, in order of first appearance.  stages: parents first."""
    result: dict[str, dict[str, list[int]]] = {}
    root_of: dict[str, str] = {}
    """Sample -> the group of the prompt that it descends from."""
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
