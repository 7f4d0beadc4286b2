"""The partition of a rank's samples over updates and micro-batches. Units (`Track.unit_ids`) stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch
from unirl.core.errors import BatchError
from unirl.core.match.mismatch_bounds import MismatchBounds
from unirl.core.types.batch import rows_by_group
from unirl.core.types.track import Status, TextSegment, Track

from ..tokens.batches import TokenLoad, micro_batches_by_tokens

if TYPE_CHECKING:
    from unirl.core.specs.config import TrainConfig

    from .updater import Updater

__all__ = ["UpdateSettings", "micro_batches", "micro_batches_by_rows", "mini_batches"]


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a rollout is divided into updates and micro-batches."""

    updates: int = 1
    """Optimizer steps per rollout, with equal shares of the samples; `mini_batches` divides them."""
    micro_batch_size: int = 0
    """Samples per forward and backward; 0 takes a whole mini-batch. A rank with fewer micro-batches than others repeats
    its smallest unit at weight 0."""
    micro_batch_tokens: int = 0
    """For text tracks, tokens per forward and backward instead, prompts included; 0 counts samples."""
    packing: bool = True
    """Pack completions without padding; without packing, padding counts towards `micro_batch_tokens`."""
    mismatch_bounds: MismatchBounds = field(default_factory=MismatchBounds)
    """Bounds on |engine log-prob - recomputed log-prob| over a rollout."""
    version: int | None = None
    """Version of the weights being trained. Mismatch is measured only on samples of this version; None takes all."""

    @classmethod
    def of(cls, train: TrainConfig, *, version: int) -> UpdateSettings:
        """As the plan says, for weights of this version."""
        return cls(
            updates=train.updates_per_step,
            micro_batch_size=train.micro_batch_size,
            micro_batch_tokens=train.micro_batch_tokens,
            packing=train.packing,
            mismatch_bounds=MismatchBounds(largest=train.logp_mismatch_max, mean=train.logp_mismatch_mean),
            version=version,
        )


def micro_batches(track: Track, settings: UpdateSettings, updater: Updater) -> list[list[Track]]:
    """The micro-batches of each update, units whole; as many on every rank."""
    _check_geometry(track, settings)
    kept = _kept(track, settings, updater)
    units = kept.units()
    groups = [kept.group_ids[rows[0]] for rows in units]
    partition = mini_batches(groups, settings.updates, sizes=[len(rows) for rows in units])
    updates = [_divided(kept, [units[unit] for unit in part], settings) for part in partition]
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
    """Rows of each micro-batch: consecutive units, at most `size` rows unless one unit has more; 0 is no limit."""
    batches: list[list[int]] = []
    for rows in units:
        if batches and (not size or len(batches[-1]) + len(rows) <= size):
            batches[-1].extend(rows)
        else:
            batches.append(list(rows))
    return [sorted(batch) for batch in batches]


def _check_geometry(track: Track, settings: UpdateSettings) -> None:
    updates, micro_batch_size = settings.updates, settings.micro_batch_size
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
    if settings.micro_batch_tokens and not isinstance(track.segment, TextSegment):
        raise BatchError(
            f"train.micro_batch_tokens: got {settings.micro_batch_tokens}; track {track.name!r} is not a text track. "
            "Use train.micro_batch_size."
        )


def _kept(track: Track, settings: UpdateSettings, updater: Updater) -> Track:
    """The units that have a row with weight; equally many on every rank."""
    units = track.units()
    counted = [rows for rows in units if any(float(track.sample_weights[row]) != 0 for row in rows)]
    problem = _oversized(track, counted, settings)
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


def _oversized(track: Track, units: Sequence[Sequence[int]], settings: UpdateSettings) -> str:
    """Why a unit of several rows fits in no micro-batch; "" if all fit."""
    if track.unit_ids is None:
        return ""
    for rows in units:
        if settings.micro_batch_tokens:
            key, limit, noun = "micro_batch_tokens", settings.micro_batch_tokens, "tokens"
            load = TokenLoad.of([track.text.total_lengths[row] for row in rows])
            size = load.tokens(padded=not settings.packing)
        else:
            key, limit, size, noun = "micro_batch_size", settings.micro_batch_size, len(rows), "rows"
        if len(rows) > 1 and limit and size > limit:
            return (
                f"train.{key}: got {limit}, but unit {track.unit_ids[rows[0]]!r} of track {track.name!r} has {size} "
                f"{noun}, and a unit is never split. Use {size} or more."
            )
    return ""


def _divided(track: Track, units: Sequence[Sequence[int]], settings: UpdateSettings) -> list[list[int]]:
    """Rows of each micro-batch of one update that trains on these units."""
    if not settings.micro_batch_tokens:
        return micro_batches_by_rows(units, settings.micro_batch_size)
    lengths, budget = track.text.total_lengths, settings.micro_batch_tokens
    return micro_batches_by_tokens(lengths, budget, units=units, padded=not settings.packing)


def _fillers(track: Track, count: int) -> list[Track]:
    """Micro-batches of weight 0: copies of the unit with the fewest tokens, or rows."""
    if not count:
        return []
    costs = track.text.total_lengths if isinstance(track.segment, TextSegment) else (1,) * track.num_rows
    smallest = min(track.units(), key=lambda rows: sum(costs[row] for row in rows))
    return track.padding(smallest, copies=count).chunks(len(smallest))
