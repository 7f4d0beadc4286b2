"""Watching for reward hacking: a reward that is trained rises while something else that is logged falls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from .scoring import known

if TYPE_CHECKING:
    from unirl.core.types.track import Track

__all__ = ["RewardWatch", "shift"]

LEAST_STEPS = 10
LARGE = 0.5


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
                    "at the samples, and give it weight or a gate.",
                )
