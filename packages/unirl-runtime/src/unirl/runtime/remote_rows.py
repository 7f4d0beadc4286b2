"""Tensors that stay where they were made, and what the driver passes on in their place.

A `RemoteRows` knows the shape and dtype of a tensor and where its rows lie. Taking rows, splitting and joining happen
on that knowledge alone; the numbers travel once, from the worker that has them to the one that needs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.batch import Batch

__all__ = ["Fetch", "Keep", "Piece", "RemoteRows", "dehydrated", "hydrated", "renamed", "renames"]

B = TypeVar("B", bound=Batch)

LARGE_ROW_BYTES = 256
"""Rows of more bytes than this stay where they were made; below it the reference would weigh as much."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of one stored tensor."""

    blob: Any
    """What the transport calls the tensor; small and picklable."""
    start: int
    count: int


Keep = Callable[[Sequence[Tensor]], Sequence[Any]]
"""Stores tensors and gives what to call each, a `Piece.blob`; one call for many."""
Fetch = Callable[[Sequence["RemoteRows"]], list[Tensor]]
"""Brings tensors here: one call for many, so that a transport can join what comes from one place."""


class RemoteRows:
    """[N, ...] rows that lie elsewhere. Stands in for a tensor wherever only rows are taken and joined."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        fetch: Fetch | None = None,
    ) -> None:
        """fetch: how `cpu()` gets the numbers. It stays in this process: a copy sent elsewhere has none."""
        self.pieces = tuple(pieces)
        self.row_shape = row_shape
        self.dtype = dtype
        self._fetch = fetch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetch": None}

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.count for piece in self.pieces), *self.row_shape)

    @property
    def ndim(self) -> int:
        return 1 + len(self.row_shape)

    @property
    def device(self) -> torch.device:
        """Where an index over the rows has to be: here, not where the rows are."""
        return torch.device("cpu")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"RemoteRows(shape={list(self.shape)}, dtype={self.dtype}, pieces={len(self.pieces)})"

    def __getitem__(self, rows: slice) -> RemoteRows:
        if not isinstance(rows, slice):
            raise TypeError(f"{self!r}[{rows!r}]: only slices of rows can be taken without the numbers. {_FETCH}")
        return self.index_select(0, torch.arange(len(self))[rows])

    def index_select(self, dim: int, index: Tensor) -> RemoteRows:
        """The rows at `index`, in that order. Raises IndexError where a tensor would."""
        if dim not in (0, -self.ndim):
            raise IndexError(f"{self!r}: dimension {dim} was asked for; without the numbers rows (0) can be taken.")
        if index.ndim > 1 or index.dtype not in (torch.int64, torch.int32):
            raise IndexError(
                f"{self!r}: an index of {index.dtype} {list(index.shape)} was given; row numbers are a vector of int64."
            )
        places = [(piece.blob, piece.start + offset) for piece in self.pieces for offset in range(piece.count)]
        found: list[Piece] = []
        for row in cast("list[int]", index.reshape(-1).tolist()):
            if not 0 <= row < len(places):
                raise IndexError(f"{self!r}: row {row} was asked for; there are {len(places)}, counted from 0.")
            blob, at = places[row]
            last = found[-1] if found else None
            if last is not None and last.blob == blob and last.start + last.count == at:
                found[-1] = Piece(blob, last.start, last.count + 1)
            else:
                found.append(Piece(blob, at, 1))
        return RemoteRows(found, row_shape=self.row_shape, dtype=self.dtype, fetch=self._fetch)

    def with_fetch(self, fetch: Fetch) -> RemoteRows:
        return RemoteRows(self.pieces, row_shape=self.row_shape, dtype=self.dtype, fetch=fetch)

    def renamed(self, names: Mapping[Any, Any]) -> RemoteRows:
        """The rows with their tensors by other names, where they have one."""
        pieces = [Piece(names.get(piece.blob, piece.blob), piece.start, piece.count) for piece in self.pieces]
        return RemoteRows(pieces, row_shape=self.row_shape, dtype=self.dtype, fetch=self._fetch)

    def contiguous(self) -> RemoteRows:
        return self

    def detach(self) -> RemoteRows:
        return self

    def cpu(self) -> Tensor:
        """The numbers, here: for the few images that a tracker shows."""
        if self._fetch is None:
            raise TypeError(f"{self!r}: nothing here can fetch it.")
        return self._fetch([self])[0].cpu()

    def to(self, device: str | torch.device) -> RemoteRows:
        """Itself: a device is chosen when the rows are fetched. Raises TypeError for anything but a device."""
        if not isinstance(device, str | torch.device):
            raise TypeError(f"{self!r}.to({device!r}): rows change their device alone, when they are fetched. {_FETCH}")
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.cat, torch.concat, torch.concatenate):
            return _cat(*args, **(kwargs or {}))
        _refuse(getattr(func, "__name__", str(func)))


_FETCH = "Fetch them first."


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"torch.{name} was called on rows that lie with a worker; on the driver rows can be taken and joined only. "
        f"{_FETCH}"
    )


def _cat(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> RemoteRows:
    parts = [part for part in tensors if isinstance(part, RemoteRows)]
    if len(parts) < len(tensors):
        raise TypeError("torch.cat: rows that lie with a worker cannot be joined with rows that are here.")
    first = parts[0]
    if dim not in (0, -first.ndim) or out is not None:
        raise TypeError(f"torch.cat: {first!r} can be joined along rows alone, and not into a tensor. {_FETCH}")
    kinds = {(part.row_shape, part.dtype) for part in parts}
    if len(kinds) > 1:
        raise TypeError(f"torch.cat: the parts have rows of different shape or dtype: {sorted(map(str, kinds))}.")
    fetch = next((part._fetch for part in parts if part._fetch is not None), None)
    pieces = [piece for part in parts for piece in part.pieces]
    return RemoteRows(pieces, row_shape=first.row_shape, dtype=first.dtype, fetch=fetch)


def dehydrated(batch: B, keep: Keep) -> B:
    """The batch with its large tensors left here. One call of `keep` stores them all; one named twice is kept once."""
    large: dict[int, Tensor] = {}

    def note(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0]:
            row_bytes = value.numel() // value.shape[0] * value.element_size()
            if row_bytes > LARGE_ROW_BYTES:
                large[id(value)] = value
        return value

    _mapped(batch, note)
    if not large:
        return batch
    left = {
        number: RemoteRows([Piece(blob, 0, value.shape[0])], row_shape=tuple(value.shape[1:]), dtype=value.dtype)
        for (number, value), blob in zip(large.items(), keep(list(large.values())), strict=True)
    }
    return _mapped(batch, lambda value: left.get(id(value), value))


def hydrated(batch: B, fetch: Fetch) -> B:
    """The batch with every tensor here. One call of `fetch` brings them all; a tensor named twice comes once."""
    wanted: dict[int, RemoteRows] = {}

    def note(value: Any) -> Any:
        if isinstance(value, RemoteRows):
            wanted[id(value)] = value
        return value

    _mapped(batch, note)
    if not wanted:
        return batch
    found = dict(zip(wanted, fetch(list(wanted.values())), strict=True))
    return _mapped(batch, lambda value: found.get(id(value), value))


def renames(before: Batch, after: Batch) -> dict[Any, Any] | None:
    """What each tensor that was left behind is called in another batch of the same samples.

    None when the batches differ in anything that came along, bit for bit: then these are not the same samples.
    """
    old, new = _leaves(before), _leaves(after)
    names: dict[Any, Any] = {}
    if len(old) != len(new):
        return None
    for one, other in zip(old, new, strict=True):
        if isinstance(one, RemoteRows) and isinstance(other, RemoteRows):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return None
            names |= {a.blob: b.blob for a, b in zip(one.pieces, other.pieces, strict=True)}
        elif not (torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other):
            return None
    return names


def renamed(value: Any, names: Mapping[Any, Any]) -> Any:
    """A batch, or a tuple of tensors, with its rows by other names; those without one keep theirs."""
    if not names:
        return value
    return _mapped(value, lambda item: item.renamed(names) if isinstance(item, RemoteRows) else item)


def _leaves(batch: Batch) -> list[Any]:
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    _mapped(batch, note)
    return found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch with every tensor in it changed: in fields, mappings, tuples and nested batches."""
    if isinstance(value, Batch):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        changed = {name: _mapped(item, change) for name, item in fields.items()}
        return dataclasses.replace(value, **{n: item for n, item in changed.items() if item is not fields[n]})
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        changed = {key: _mapped(item, change) for key, item in items.items()}
        return value if all(changed[key] is items[key] for key in items) else changed
    if type(value) is tuple:
        entries = cast("tuple[Any, ...]", value)
        new = tuple(_mapped(item, change) for item in entries)
        return entries if all(a is b for a, b in zip(new, entries, strict=True)) else new
    return change(value)
