"""Curves that keep their extremes while they lose points: in memory, where a run may have millions, and for a page."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MOST_POINTS", "Curve", "downsample"]

MOST_POINTS = 20_000
"""Points of a curve in memory. When there are more, half as many are left."""
LARGEST = 1e100
"""Of values, on either side of 0."""


class Curve:
    """Values by rising step."""

    def __init__(self, *, most: int = MOST_POINTS) -> None:
        self.steps = array("q")
        self.values = array("d")
        self._most = most

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add points; those that are there of these steps and of later ones are replaced.

        steps: rising, from 0.  values: of equal length; those that are not finite, or beyond `LARGEST`, are left out.
        """
        if self.steps and steps[0] <= self.steps[-1]:
            self.rewind(steps[0] - 1)
        numbers = np.array(values, dtype=float)
        # Also false for NaN.
        keep = np.abs(numbers) <= LARGEST
        self.steps.extend(steps if keep.all() else [step for step, one in zip(steps, keep, strict=True) if one])
        self.values.frombytes(numbers[keep].tobytes())
        if len(self.steps) > self._most:
            kept = downsample(self.values, self._most // 2)
            self.steps = array("q", (self.steps[at] for at in kept))
            self.values = array("d", (self.values[at] for at in kept))

    def rewind(self, step: int) -> None:
        """Remove the points after this step."""
        end = bisect_right(self.steps, step)
        del self.steps[end:]
        del self.values[end:]

    def shown(self, most: int) -> dict[str, Any]:
        """The curve as JSON: at most `most` points, and then also the `means` of the ranges that lost some.

        Values have 6 significant digits.
        """
        if len(self.steps) <= most:
            return {"steps": list(self.steps), "values": [_short(value) for value in self.values]}
        kept = downsample(self.values, most)
        edges = _edges(len(self.steps), most)
        sizes = np.diff([*edges, len(self.steps)])
        middle = np.add.reduceat(np.asarray(self.steps, dtype=float), edges) / sizes
        means = np.add.reduceat(np.asarray(self.values), edges) / sizes
        return {
            "steps": [self.steps[at] for at in kept],
            "values": [_short(self.values[at]) for at in kept],
            "means": {"steps": [_short(at) for at in middle], "values": [_short(value) for value in means]},
        }


def downsample(values: array[float], most: int) -> list[int]:
    """Indices of at most `most` of these values, rising: the first and the last, and the lowest and the highest of each
    of evenly long ranges. All indices when there are no more values than that.

    most: at least 4.
    """
    if len(values) <= most:
        return list(range(len(values)))
    numbers = np.asarray(values)
    edges = _edges(len(values), most)
    kept = {0, len(values) - 1}
    for start, end in zip(edges, [*edges[1:], len(values)], strict=True):
        part = numbers[start:end]
        kept |= {int(start + part.argmin()), int(start + part.argmax())}
    return sorted(kept)


def _edges(length: int, most: int) -> list[int]:
    """Where each range begins: half as many as points, beside the first and the last point."""
    ranges = (most - 2) // 2
    return [at * length // ranges for at in range(ranges)]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
