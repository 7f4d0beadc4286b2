"""The partition of a rank's samples over updates and micro-batches. Units (`Track.unit_ids`) stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from unirl.core.errors import BatchError
from unirl.core.types.batch import rows_by_group
from unirl.core.types.track import Status, TextSegment, Track

from ..tokens.batches import TokenLoad, micro_batches_by_tokens

if TYPE_CHECKING:
    from unirl.core.specs.config import TrainConfig

    from .updater import Updater

__all__ = ["micro_batches", "micro_batches_by_rows", "mini_batches"]


def micro_batches(track: Track, train: TrainConfig, updater: Updater) -> list[list[Track]]:
    """The micro-batches of each update, units whole; as many on every rank.

    A rank with fewer micro-batches than others repeats its smallest unit at weight 0.
    """
    _check_geometry(track, train)
    kept = _kept(track, train, updater)
    units = kept.units()
    groups = [kept.group_ids[rows[0]] for rows in units]
    partition = mini_batches(groups, train.updates_per_step, sizes=[len(rows) for rows in units])
    updates = [_divided(kept, [units[unit] for unit in part], train) for part in partition]
    counts = updater.all_reduce_max(torch.tensor([len(micros) for micros in updates], dtype=torch.float64))
    missing = [int(count) - len(micros) for count, micros in zip(counts, updates, strict=True)]
    fillers = iter(_fillers(kept, sum(missing)))
    return [
        [*(kept.select(rows) for rows in micros), *islice(fillers, count)]
        for micros, count in zip(updates, missing, strict=True)
    ]


def mini_batches(group_ids: Sequence[str], updates: int, *, sizes: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of the units of each update: every group is partitioned over the updates, the next to the smallest.

    group_ids: group of each unit.  sizes: rows of each unit; 1 if None.
    The updates' rows differ by at most the largest unit. With units of one size it is round-robin, and the shares of a
    group differ by at most one unit. If units per group are then a multiple of `updates`, a unit's update depends only
    on its place in its group, so any number of ranks makes the same updates. Units keep their order within an update;
    with one update the batch is unchanged.
    """
    partition: list[list[int]] = [[] for _ in range(updates)]
    filled = [0] * updates
    for unit in (unit for units in rows_by_group(group_ids).values() for unit in units):
        smallest = filled.index(min(filled))
        partition[smallest].append(unit)
        filled[smallest] += 1 if sizes is None else sizes[unit]
    return [sorted(units) for units in partition]


def micro_batches_by_rows(units: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Rows of each micro-batch: consecutive units, at most `size` rows unless one unit has more; 0 sets no limit."""
    batches: list[list[int]] = []
    for rows in units:
        if batches and (not size or len(batches[-1]) + len(rows) <= size):
            batches[-1].extend(rows)
        else:
            batches.append(list(rows))
    return [sorted(batch) for batch in batches]


def _check_geometry(track: Track, train: TrainConfig) -> None:
    updates, micro_batch_size = train.updates_per_step, train.micro_batch_size
    num_units = sum(any(track.status[row] is not Status.PADDING for row in rows) for rows in track.units())
    if micro_batch_size < 0:
        raise BatchError(
            f"train.micro_batch_size: got {micro_batch_size}, expected 0 (a whole mini-batch) or samples per forward."
        )
    if updates < 1:
        raise BatchError(f"train.updates_per_step: got {updates}, expected 1 or more.")
    if updates > max(num_units, 1):
        noun = "samples" if track.unit_ids is None else "units"
        raise BatchError(
            f"train.updates_per_step: got {updates} updates, but this rank has {num_units} {noun} of track "
            f"{track.name!r}, and each update needs one. Sample more, or use {max(num_units, 1)} updates or fewer."
        )
    if train.micro_batch_tokens and not isinstance(track.segment, TextSegment):
        raise BatchError(
            f"train.micro_batch_tokens: got {train.micro_batch_tokens}; track {track.name!r} is not a text track. "
            "Use train.micro_batch_size."
        )


def _kept(track: Track, train: TrainConfig, updater: Updater) -> Track:
    """The units that have a row with weight; equally many on every rank."""
    units = track.units()
    weights = cast("list[float]", cast("Any", track.sample_weights).tolist())
    counted = [rows for rows in units if any(weights[row] != 0 for row in rows)]
    problem = _oversized(track, counted, train)
    # Also the negative minimum of the rows: a rank without any, or with a unit that does not fit, is seen by all
    # instead of hanging the others.
    sizes = updater.all_reduce_max(torch.tensor([len(counted), -track.num_rows, bool(problem)], dtype=torch.float64))
    most, has_rows, fits = int(sizes[0]), int(sizes[1]) < 0, not int(sizes[2])
    if not has_rows:
        raise BatchError(
            f"Track {track.name!r}: a rank has no rows at all; give every rank at least one, if only as padding."
        )
    if not fits:
        raise BatchError(problem or f"Track {track.name!r}: another rank has a unit larger than a micro-batch.")
    if most and not counted:
        return track.padding(units[0], copies=most)
    kept = track.select(sorted(row for rows in counted for row in rows))
    return kept.padded(kept.num_rows + (most - len(counted)) * len(kept.units()[-1])) if counted else kept


def _oversized(track: Track, units: Sequence[Sequence[int]], train: TrainConfig) -> str:
    """Why a unit of several rows fits in no micro-batch; "" if all fit."""
    if track.unit_ids is None:
        return ""
    for rows in units:
        if train.micro_batch_tokens:
            key, limit, noun = "micro_batch_tokens", train.micro_batch_tokens, "tokens"
            load = TokenLoad.of([track.text.total_lengths[row] for row in rows])
            size = load.tokens(padded=not train.packing)
        else:
            key, limit, size, noun = "micro_batch_size", train.micro_batch_size, len(rows), "rows"
        if len(rows) > 1 and limit and size > limit:
            return (
                f"train.{key}: got {limit}, but unit {track.unit_ids[rows[0]]!r} of track {track.name!r} has {size} "
                f"{noun}, and a unit is never split. Use {size} or more."
            )
    return ""


def _divided(track: Track, units: Sequence[Sequence[int]], train: TrainConfig) -> list[list[int]]:
    """Rows of each micro-batch of one update that trains on these units."""
    if not train.micro_batch_tokens:
        return micro_batches_by_rows(units, train.micro_batch_size)
    lengths, budget = track.text.total_lengths, train.micro_batch_tokens
    return micro_batches_by_tokens(lengths, budget, units=units, padded=not train.packing)


def _fillers(track: Track, count: int) -> list[Track]:
    """Micro-batches of weight 0: copies of the unit with the fewest tokens, or rows."""
    if not count:
        return []
    costs = track.text.total_lengths if isinstance(track.segment, TextSegment) else (1,) * track.num_rows
    smallest = min(track.units(), key=lambda rows: sum(costs[row] for row in rows))
    return track.padding(smallest, copies=count).chunks(len(smallest))
