"""Watching the rewards of a run: for hacking, where a trained reward rises while another value falls, and for a
collapsed policy, whose samples all score like the worst of those it began with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from .scoring import known

if TYPE_CHECKING:
    from unirl.core.types.array import Array
    from unirl.core.types.track import Track

__all__ = ["RewardWatch", "shift"]

LEAST_STEPS = 10
LARGE = 0.5
COLLAPSE_STEPS = 5
"""Number of first steps, and of last steps, that are compared."""


def shift(steps: list[tuple[float, float]]) -> float:
    """How far a mean moved from the first half of some steps to the second, in standard deviations among samples.

    steps: (mean, standard deviation) over the samples of each. 0 where samples of a step do not differ at all.
    """
    half, spread = len(steps) // 2, fmean(spread for _, spread in steps)
    moved = fmean(mean for mean, _ in steps[half:]) - fmean(mean for mean, _ in steps[:half])
    return moved / spread if spread else 0.0


class RewardWatch:
    """Compares the last steps of a run with as many before them: a tenth of the run each, at least `LEAST_STEPS`.

    It begins anew when a run is resumed.
    """

    def __init__(self, max_steps: int) -> None:
        self._window = 2 * max(LEAST_STEPS, max_steps // 10)
        self._steps: dict[str, deque[tuple[float, float]]] = {}
        self._first: dict[str, list[Array]] = {}
        self._last: dict[str, deque[float]] = {}

    def collapses(self, track: Track) -> Iterator[tuple[str, str]]:
        """Record a rollout; yields each reward of positive weight whose mean over the last `COLLAPSE_STEPS` rollouts is
        at or below the lowest score in the first ones, with a text about it.

        Nothing is reported if all of the first samples scored alike.
        """
        for name, values in track.reward_parts.items():
            if track.reward_weights.get(name, 0.0) <= 0 or not (scores := known(values)).numel():
                continue
            first = self._first.setdefault(f"{track.name}/{name}", [])
            last = self._last.setdefault(f"{track.name}/{name}", deque(maxlen=COLLAPSE_STEPS))
            last.append(float(scores.double().mean()))
            if len(first) < COLLAPSE_STEPS:
                first.append(scores.detach().double().cpu())
            means, lowest = [float(each.mean()) for each in first], min(float(each.min()) for each in first)
            if len(last) == COLLAPSE_STEPS and fmean(last) <= lowest < fmean(means):
                yield (
                    name,
                    f"reward: the policy may have collapsed: {name!r} was {fmean(means):.3g} in the first {len(first)} "
                    f"steps, {lowest:.3g} for the worst sample, and is {fmean(last):.3g} in the last {len(last)}. Look "
                    "at the samples; a learning rate that is too high is the usual cause. Start a new run with a lower "
                    "one; run.on_collapse=fail stops such a run.",
                )

    def pairs(self, track: Track) -> Iterator[tuple[str, str, str]]:
        """Note a step; gives a trained reward that rose, a reward or component that fell, and a text about both.

        Those of a negative weight are left out: it is not said which way they should go.
        """
        weights, shifts = track.reward_weights, dict[str, float]()
        for part, values in track.reward_parts.items():
            steps = self._steps.setdefault(f"{track.name}/{part}", deque(maxlen=self._window))
            if (there := known(values)).numel() and weights.get(part.partition("/")[0], 0.0) >= 0:
                steps.append((float(there.mean()), float(there.std(correction=0))))
                if len(steps) == self._window:
                    shifts[part] = shift(list(steps))
        for rising in (name for name in shifts if weights.get(name) and shifts[name] >= LARGE):
            for falling in (part for part in shifts if shifts[part] <= -LARGE):
                yield (
                    rising,
                    falling,
                    f"reward: the trained reward {rising!r} rose by {shifts[rising]:.2g} and {falling!r} fell by "
                    f"{-shifts[falling]:.2g} standard deviations of their samples, from the {self._window // 2} steps "
                    f"before to the last {self._window // 2}. If it should not fall, this may be reward hacking: look "
                    "at the samples, and give it weight or a gate; run.on_hacking=fail stops such a run.",
                )
