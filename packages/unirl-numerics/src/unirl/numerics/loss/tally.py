"""Metrics that add up exactly over micro-batches, updates and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Metric

__all__ = ["Reducer", "Tally"]

Reduce = Literal["mean", "max", "sum"]


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
        self._found: dict[str, _Numbers] = {}
        self._unread: list[tuple[str, Metric]] = []
        self._reduce: dict[str, Reduce] = {}
        self._merged = 0

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add those of one micro-batch. A weight of 0 adds nothing, whatever its total. Tensors stay on the device."""
        for name, metric in metrics.items():
            before = self._reduce.setdefault(name, metric.reduce)
            if before != metric.reduce:
                raise BatchError(
                    f"metric {name!r}: {metric.reduce!r} in one micro-batch, {before!r} in another; keep one."
                )
            # Nothing of the graph that it was computed from is kept.
            self._unread.append((name, replace(metric, total=_detached(metric.total), weight=_detached(metric.weight))))

    def merge(self, other: Tally) -> None:
        """Add those of one update."""
        self._merged += 1
        self.add({name: Metric(total=m.total, weight=m.weight, reduce=m.reduce) for name, m in other._read().items()})

    def _read(self) -> dict[str, _Numbers]:
        """All that was added, in one transfer from each device."""
        unread, self._unread = self._unread, []
        values = iter(_floats([value for _, metric in unread for value in (metric.total, metric.weight)]))
        for name, metric in unread:
            numbers = _Numbers(next(values), next(values), metric.reduce)
            counted = numbers if numbers.weight else _Numbers(0.0, 0.0, metric.reduce)
            before = self._found.get(name)
            self._found[name] = counted if before is None else _joined(before, counted)
        return self._found

    def reduced(self, ranks: Reducer) -> dict[str, float]:
        """name -> value over all ranks, names with no weight left out. Collective."""
        found = self._read()
        names = sorted(found)
        if ranks.num_ranks > 1:
            self._check_names(names, ranks)
        if not names:
            return {}
        result = [found[name] for name in names]
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
        text = "\n".join(f"{name} {self._reduce[name]}" for name in names)
        code = float(zlib.crc32(text.encode()))
        both = ranks.all_reduce_max(torch.tensor([code, -code], dtype=torch.float64))
        if float(both[0]) != -float(both[1]):
            raise BatchError(
                f"metrics: the ranks report different ones; this one has {names}. "
                "An algorithm returns the same metrics for every micro-batch, at weight 0 where there is nothing."
            )


class _Numbers(NamedTuple):
    """A metric on the host."""

    total: float
    weight: float
    reduce: Reduce


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _floats(values: Sequence[float | Tensor]) -> list[float]:
    """The values as numbers; tensors of one device are read together, in fp64."""
    result = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(place)
    for places in by_device.values():
        together = torch.stack([cast(Tensor, values[place]).double().reshape(()) for place in places])
        for place, number in zip(places, cast("list[float]", cast("Any", together).tolist()), strict=True):
            result[place] = number
    return result


def _joined(one: _Numbers, other: _Numbers) -> _Numbers:
    if one.reduce == "max":
        totals = [m.total for m in (one, other) if m.weight]
        return _Numbers(max(totals, default=0.0), one.weight + other.weight, "max")
    return _Numbers(one.total + other.total, one.weight + other.weight, one.reduce)


def _addable(metric: _Numbers) -> float:
    return 0.0 if metric.reduce == "max" else metric.total


def _maximum(metric: _Numbers) -> float:
    return metric.total if metric.reduce == "max" and metric.weight else float("-inf")
