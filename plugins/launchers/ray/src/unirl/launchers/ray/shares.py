"""The rows of a rollout that each worker gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from unirl.core.types.batch import rows_by_group
from unirl.core.types.request import Request
from unirl.core.types.track import Conditions, TextSegment, Track
from unirl.numerics.balance import balance

__all__ = ["for_training", "padded", "share_of", "shares", "track_shares"]


def shares(
    group_ids: Sequence[str],
    workers: int,
    *,
    units: Sequence[Sequence[int]] | None = None,
    costs: Sequence[int] | None = None,
    whole_groups: bool = False,
) -> list[list[int]]:
    """Rows of each worker: whole groups, in order, as even as possible; units when there are too few groups.

    units: rows that stay together, each within a group; single rows if None.

    whole_groups: never split a group; with too few groups some workers get none.

    costs: per row; the groups are then partitioned to balance total cost, with about equally many groups per worker.
    Whole groups keep the mini-batches of an update those of one rank (`unirl.numerics.train.partition.mini_batches`),
    and the embeddings of a prompt on one worker.
    """
    groups = list(rows_by_group(group_ids).values())
    stay_whole = whole_groups or len(groups) >= workers
    pieces = groups if stay_whole else units or [[row] for row in range(len(group_ids))]
    if costs is not None:
        parts = balance([sum(costs[row] for row in rows) for rows in pieces], workers, equal_counts=True)
        return [[row for piece in part for row in pieces[piece]] for part in parts]
    partition: list[list[int]] = []
    left, start = len(group_ids), 0
    for worker in range(workers):
        expected, rows = left / (workers - worker), list[int]()
        # The last pieces go to workers that have none yet.
        while start < len(pieces) - (workers - worker - 1) and (
            not rows or abs(len(rows) + len(pieces[start]) - expected) <= abs(len(rows) - expected)
        ):
            rows += pieces[start]
            start += 1
        partition.append(rows)
        left -= len(rows)
    return partition


def track_shares(track: Track, workers: int) -> list[list[int]]:
    """Rows of each worker that runs forwards over a track, units whole; those of text cost their tokens."""
    costs = track.segment.total_lengths if isinstance(track.segment, TextSegment) else None
    return shares(track.group_ids, workers, units=track.units(), costs=costs)


def share_of(track: Track, rows: Sequence[int]) -> Track:
    """A worker's rows, with the data that training needs."""
    return for_training(track.select(rows) if rows else _empty(track))


def padded(request: Request, rows: Sequence[int], *, to: int) -> Request:
    """The rows, padded to `to` by repeating the last one under new ids, since ids must be unique."""
    own = list(rows) or [0]
    missing = to - len(rows)
    share = request.select([*rows, *[own[-1]] * missing])
    ids = tuple(share.sample_ids[: len(rows)]) + tuple(f"{share.sample_ids[-1]}/padding-{n}" for n in range(missing))
    return dataclasses.replace(share, sample_ids=ids)


def _empty(track: Track) -> Track:
    """One unit of weight 0, for a rank without samples: all ranks must run the same forwards."""
    return track.padding(track.units()[0])


def for_training(track: Track) -> Track:
    """The track without data no loss reads: media, turns and unused prompts."""
    conditions: dict[str, Conditions] = {name: value.compact() for name, value in track.conditions.items()}
    return dataclasses.replace(track, media=None, turns=None, conditions=conditions)
