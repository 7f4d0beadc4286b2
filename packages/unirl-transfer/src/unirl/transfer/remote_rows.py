"""References to tensors that stay on the worker that produced them; the driver passes these on instead.

A `RemoteRows` knows the shape and dtype of a tensor and where its rows are stored. Indexing, splitting and joining use
only this metadata; the data is sent once, from the worker that has it to the one that needs it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.types.batch import Batch
from unirl.core.types.media import Media

__all__ = ["Fetch", "Keep", "Piece", "RemoteRows", "dehydrated", "fetchable", "hydrated", "renamed", "renames"]

B = TypeVar("B", bound=Batch)

LARGE_ROW_BYTES = 256
"""Tensors whose rows exceed this many bytes stay remote; below it a reference would be as large as the data."""


@dataclass(frozen=True)
class Piece:
    """Contiguous rows of one stored tensor."""

    blob: Any
    """The transport's handle of the tensor; small and picklable."""
    start: int
    count: int


Keep = Callable[[Sequence[Tensor]], Sequence[Any]]
"""Stores tensors and returns a handle for each, a `Piece.blob`; batched."""
Fetch = Callable[[Sequence["RemoteRows"]], list[Tensor]]
"""Fetches tensors to this process; batched, so that a transport can merge requests to one worker."""


class RemoteRows:
    """[N, ...] rows stored elsewhere. Replaces a tensor wherever rows are only indexed and joined."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        frames: int | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """frames: stored rows, of `row_shape`, that make one row here, so that some of them can be left out; None where
        a stored row is a row.

        fetch: how `cpu()` gets the data. Not pickled: a copy in another process has none.
        """
        self.pieces = tuple(pieces)
        self.row_shape = row_shape
        self.dtype = dtype
        self.frames = frames
        self._fetch = fetch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetch": None}

    @property
    def shape(self) -> tuple[int, ...]:
        count = sum(piece.count for piece in self.pieces)
        return (count, *self.row_shape) if self.frames is None else (count // self.frames, self.frames, *self.row_shape)

    @property
    def stored(self) -> RemoteRows:
        """The rows as they are stored, which is how a transport fetches them."""
        return self if self.frames is None else RemoteRows(self.pieces, row_shape=self.row_shape, dtype=self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Device for row indices: the CPU of this process, not where the rows are stored."""
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
            raise TypeError(f"{self!r}[{rows!r}]: remote rows can only be sliced along dimension 0. {_FETCH}")
        return self.index_select(0, torch.arange(len(self))[rows])

    def index_select(self, dim: int, index: Tensor) -> RemoteRows:
        """The rows at `index`, in that order; along dimension 1 the frames of every row, where these are stored apart.
        Raises IndexError where a tensor would."""
        of_frames = dim == 1 and self.frames is not None
        if dim not in (0, -self.ndim) and not of_frames:
            raise IndexError(f"{self!r}: got dimension {dim}, but remote rows can only be indexed along dimension 0.")
        if index.ndim > 1 or index.dtype not in (torch.int64, torch.int32):
            raise IndexError(
                f"{self!r}: got an index of {index.dtype} {list(index.shape)}, expected a vector of int64 row numbers."
            )
        chosen = cast("list[int]", index.reshape(-1).tolist())
        for row in chosen:
            if not 0 <= row < self.shape[dim]:
                raise IndexError(f"{self!r}: got row {row}, but there are {self.shape[dim]}, counted from 0.")
        each = self.frames or 1
        stored = [each * row + frame for row in range(len(self)) for frame in chosen] if of_frames else []
        stored = stored or [each * row + frame for row in chosen for frame in range(each)]
        return self._with(self._pieces_at(stored), frames=len(chosen) if of_frames else self.frames)

    def _pieces_at(self, rows: Sequence[int]) -> list[Piece]:
        """These of the stored rows, neighbours together."""
        places = [(piece.blob, piece.start + offset) for piece in self.pieces for offset in range(piece.count)]
        result: list[Piece] = []
        for blob, at in (places[row] for row in rows):
            last = result[-1] if result else None
            if last is not None and last.blob == blob and last.start + last.count == at:
                result[-1] = Piece(blob, last.start, last.count + 1)
            else:
                result.append(Piece(blob, at, 1))
        return result

    def _with(self, pieces: Sequence[Piece], *, frames: int | None) -> RemoteRows:
        return RemoteRows(pieces, row_shape=self.row_shape, dtype=self.dtype, frames=frames, fetch=self._fetch)

    def with_fetch(self, fetch: Fetch) -> RemoteRows:
        return RemoteRows(self.pieces, row_shape=self.row_shape, dtype=self.dtype, frames=self.frames, fetch=fetch)

    def renamed(self, names: Mapping[Any, Any]) -> RemoteRows:
        """The rows with their tensors' handles replaced where `names` has a new one."""
        pieces = [Piece(names.get(piece.blob, piece.blob), piece.start, piece.count) for piece in self.pieces]
        return self._with(pieces, frames=self.frames)

    def contiguous(self) -> RemoteRows:
        return self

    def detach(self) -> RemoteRows:
        return self

    def cpu(self) -> Tensor:
        """The data, in this process: for the few images that a tracker shows."""
        if self._fetch is None:
            raise TypeError(f"{self!r}: this process cannot fetch it.")
        return self._fetch([self.stored])[0].cpu().reshape(self.shape)

    def to(self, device: str | torch.device) -> RemoteRows:
        """Returns self: the device is chosen on fetch. Raises TypeError for anything but a device."""
        if not isinstance(device, str | torch.device):
            raise TypeError(f"{self!r}.to({device!r}): remote rows can only change device, on fetch. {_FETCH}")
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
        f"torch.{name} was called on rows stored on a worker; the driver can only index and join them. {_FETCH}"
    )


def _cat(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> RemoteRows:
    parts = [part for part in tensors if isinstance(part, RemoteRows)]
    if len(parts) < len(tensors):
        raise TypeError("torch.cat: rows stored on a worker cannot be joined with local rows.")
    first = parts[0]
    if dim not in (0, -first.ndim) or out is not None:
        raise TypeError(f"torch.cat: {first!r} can only be joined along dimension 0, and not into `out`. {_FETCH}")
    kinds = {(part.row_shape, part.frames, part.dtype) for part in parts}
    if len(kinds) > 1:
        raise TypeError(f"torch.cat: the inputs have rows of different shape or dtype: {sorted(map(str, kinds))}.")
    fetch = next((part._fetch for part in parts if part._fetch is not None), None)
    pieces = [piece for part in parts for piece in part.pieces]
    return RemoteRows(pieces, row_shape=first.row_shape, dtype=first.dtype, frames=first.frames, fetch=fetch)


def dehydrated(batch: B, keep: Keep) -> B:
    """The batch with its large tensors replaced by references. One call of `keep` stores them all, each only once.

    Of videos every frame is a stored row, so that a reward that reads some frames fetches these alone.
    """
    large: dict[int, Tensor] = {}
    videos = {id(media.values) for media in _batches(batch) if isinstance(media, Media) and media.kind == "video"}

    def note(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0]:
            row_bytes = value.numel() // value.shape[0] * value.element_size()
            if row_bytes > LARGE_ROW_BYTES:
                large[id(value)] = value
        return value

    _mapped(batch, note)
    if not large:
        return batch
    stored = {number: value.flatten(0, 1) if number in videos else value for number, value in large.items()}
    left = {
        number: RemoteRows(
            [Piece(blob, 0, len(value))],
            row_shape=tuple(value.shape[1:]),
            dtype=value.dtype,
            frames=large[number].shape[1] if number in videos else None,
        )
        for (number, value), blob in zip(stored.items(), keep(list(stored.values())), strict=True)
    }
    return _mapped(batch, lambda value: left.get(id(value), value))


def hydrated(batch: B, fetch: Fetch) -> B:
    """The batch with every reference fetched. One call of `fetch` gets them all, each only once."""
    expected: dict[int, RemoteRows] = {}

    def note(value: Any) -> Any:
        if isinstance(value, RemoteRows):
            expected[id(value)] = value
        return value

    _mapped(batch, note)
    if not expected:
        return batch
    fetched = fetch([rows.stored for rows in expected.values()])
    result = {
        number: tensor.reshape(rows.shape) for (number, rows), tensor in zip(expected.items(), fetched, strict=True)
    }
    return _mapped(batch, lambda value: result.get(id(value), value))


def fetchable(batch: B, fetch: Fetch) -> B:
    """The batch with references that can be fetched in this process, by `RemoteRows.cpu`."""
    return _mapped(batch, lambda value: value.with_fetch(fetch) if isinstance(value, RemoteRows) else value)


def renames(before: Batch, after: Batch) -> dict[Any, Any] | None:
    """Old handle -> new handle of each remote tensor, for a regenerated batch of the same samples.

    None when any local value of the batches differs in a bit: then they are not the same samples.
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
    """A batch, or a tuple of tensors, with its remote handles replaced; handles not in `names` are kept."""
    if not names:
        return value
    return _mapped(value, lambda item: item.renamed(names) if isinstance(item, RemoteRows) else item)


def _leaves(batch: Batch) -> list[Any]:
    result: list[Any] = []

    def note(value: Any) -> Any:
        result.append(value)
        return value

    _mapped(batch, note)
    return result


def _batches(batch: Batch) -> Iterator[Batch]:
    """The batch and the batches that are fields of it."""
    yield batch
    for item in dataclasses.fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Batch):
            yield from _batches(value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch with `change` applied to every tensor: in fields, mappings, tuples and nested batches."""
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
