"""Metrics that add up exactly over micro-batches, updates and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Metric

__all__ = ["Reducer", "Tally"]


class Reducer(Protocol):
    """The part of an `Updater` that joins numbers of ranks."""

    @property
    def num_ranks(self) -> int: ...
    def all_reduce_sum(self, values: Tensor) -> Tensor: ...
    def all_reduce_max(self, values: Tensor) -> Tensor: ...


class Tally:
    """Adds metrics up: totals and weights of means and sums, the largest of maxima.

    A `sum` is added over the micro-batches of an update and averaged over the updates that were merged.
    """

    def __init__(self) -> None:
        self._found: dict[str, Metric] = {}
        self._merged = 0

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add those of one micro-batch. A weight of 0 adds nothing, whatever its total."""
        for name, metric in metrics.items():
            before = self._found.get(name)
            if before is not None and before.reduce != metric.reduce:
                raise BatchError(
                    f"metric {name!r}: {metric.reduce!r} in one micro-batch, {before.reduce!r} in another; keep one."
                )
            counted = metric if metric.weight else Metric(total=0.0, weight=0.0, reduce=metric.reduce)
            self._found[name] = counted if before is None else _joined(before, counted)

    def merge(self, other: Tally) -> None:
        """Add those of one update."""
        self._merged += 1
        self.add(other._found)

    def reduced(self, ranks: Reducer) -> dict[str, float]:
        """name -> value over all ranks, names with no weight left out. Collective."""
        names = sorted(self._found)
        if ranks.num_ranks > 1:
            self._check_names(names, ranks)
        if not names:
            return {}
        result = [self._found[name] for name in names]
        added = torch.tensor([[_addable(m) for m in result], [m.weight for m in result]], dtype=torch.float64)
        highest = torch.tensor([_maximum(m) for m in result], dtype=torch.float64)
        if ranks.num_ranks > 1:
            added, highest = ranks.all_reduce_sum(added), ranks.all_reduce_max(highest)
        values: dict[str, float] = {}
        for index, (name, metric) in enumerate(zip(names, result, strict=True)):
            total, weight = float(added[0, index]), float(added[1, index])
            if not weight:
                continue
            if metric.reduce == "max":
                values[name] = float(highest[index])
            else:
                values[name] = total / (weight if metric.reduce == "mean" else max(1, self._merged))
        return values

    def _check_names(self, names: list[str], ranks: Reducer) -> None:
        # Ranks that reduce vectors of different length hang or mix their numbers up.
        text = "\n".join(f"{name} {self._found[name].reduce}" for name in names)
        code = float(zlib.crc32(text.encode()))
        both = ranks.all_reduce_max(torch.tensor([code, -code], dtype=torch.float64))
        if float(both[0]) != -float(both[1]):
            raise BatchError(
                f"metrics: the ranks report different ones; this one has {names}. "
                "An algorithm returns the same metrics for every micro-batch, at weight 0 where there is nothing."
            )


def _joined(one: Metric, other: Metric) -> Metric:
    if one.reduce == "max":
        totals = [m.total for m in (one, other) if m.weight]
        return Metric(total=max(totals, default=0.0), weight=one.weight + other.weight, reduce="max")
    return Metric(total=one.total + other.total, weight=one.weight + other.weight, reduce=one.reduce)


def _addable(metric: Metric) -> float:
    return 0.0 if metric.reduce == "max" else metric.total


def _maximum(metric: Metric) -> float:
    return metric.total if metric.reduce == "max" and metric.weight else float("-inf")
