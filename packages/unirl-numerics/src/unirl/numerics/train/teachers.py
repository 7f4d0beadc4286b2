"""Several teachers of one track: each answers for the rows that name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from unirl.core.errors import BatchError
from unirl.core.roles import Replayed, ReplayedTokens

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.types.track import Track

__all__ = ["TEACHER", "joined", "rows_of_teachers"]

TEACHER = "teacher"
"""Metadata of a sample that names its teacher."""

T = TypeVar("T", bound=Tensor | Replayed | ReplayedTokens)


def rows_of_teachers(track: Track, teachers: Mapping[str, Model]) -> dict[str, list[int]]:
    """Teacher -> its rows, in their order; none for some. Raises BatchError for a row that names no teacher."""
    result: dict[str, list[int]] = {name: [] for name in teachers}
    for row, metadata in enumerate(track.metadata):
        name = metadata.get(TEACHER)
        if name not in result:
            raise BatchError(
                f"Track {track.name!r}: sample {track.sample_ids[row]!r} has the metadata {TEACHER!r} {name!r}, "
                f"expected one of {', '.join(map(repr, teachers))}."
            )
        result[name].append(row)
    return result


def joined(parts: Sequence[tuple[Sequence[int], T]]) -> T:
    """One result of all rows, each where it belongs; entries beyond the longest text of a part are 0.

    parts: the rows of each result, together every row once. A result of no rows has one row, which is left out: its
    gradient, if it has one, is 0, so that ranks take the same backward passes.
    """
    _, first = parts[0]
    if isinstance(first, Tensor):
        return cast("T", _joined(cast("Sequence[tuple[Sequence[int], Tensor]]", parts)))
    fields = {
        item.name: _joined([(rows, getattr(result, item.name)) for rows, result in parts])
        for item in dataclasses.fields(first)
        if getattr(first, item.name) is not None
    }
    return dataclasses.replace(first, **fields)


def _joined(parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """[n, ...]."""
    widths = [max(sizes) for sizes in zip(*(value.shape[1:] for _, value in parts), strict=True)]
    filled: list[Tensor] = []
    for rows, value in parts:
        if rows:
            # From the last dimension to the first.
            missing = [width - size for width, size in zip(widths, value.shape[1:], strict=True)]
            filled.append(pad(value, [each for size in reversed(missing) for each in (0, size)]))
    result = torch.cat(filled)
    order = [row for rows, _ in parts for row in rows]
    result = result[torch.tensor(order).argsort().to(result.device)]
    for rows, value in parts:
        if not rows and value.requires_grad:
            result = result + 0 * value.sum()
    return result
