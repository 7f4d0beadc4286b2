"""Batches: frozen dataclasses whose fields say how rows of them are taken, joined and moved.

A field made with `rows()` holds one entry per sample: a tensor [N, ...], a tuple of N values, a nested batch, or a
mapping of those. A field made with `shared()` holds one value for all rows; joining batches that disagree on it raises,
because taking the first would drop the rest in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self, cast

from ..errors import BatchError
from ..names import shortened

__all__ = ["Batch", "inverse", "join", "rows", "rows_by_group", "same", "shared", "take"]

_KIND = "unirl.batch"
_PLAIN = (str, int, float, type(None))


def rows(**kwargs: Any) -> Any:
    """A field with one entry per sample."""
    return field(metadata={_KIND: "rows"}, **kwargs)


def shared(**kwargs: Any) -> Any:
    """A field with one value for all samples."""
    return field(metadata={_KIND: "shared"}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Base of everything that has rows. Subclasses are frozen dataclasses; operations return new ones."""

    @property
    def num_rows(self) -> int:
        """Number of samples, padding included."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.num_rows

    def _check_rows(self) -> None:
        """Raise when a row field does not have one entry per sample. Subclasses call it from `__post_init__`."""
        num_rows = self.num_rows
        for name in _fields(type(self), "rows"):
            _check_length(type(self).__name__, name, getattr(self, name), num_rows)

    def _map_rows(self, change: Callable[[Any], Any]) -> Self:
        changed = {name: _apply(getattr(self, name), change) for name in _fields(type(self), "rows")}
        return dataclasses.replace(self, **changed)

    def select(self, indices: Sequence[int]) -> Self:
        """The rows at `indices`, in that order; a row may be named more than once."""
        expected = [int(i) for i in indices]
        bad = [i for i in expected if not 0 <= i < self.num_rows]
        if bad:
            raise BatchError(f"{type(self).__name__}.select: got row {bad[0]}, expected 0 to {self.num_rows - 1}.")
        return self._map_rows(lambda value: take(value, expected))

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of these sizes, which must add up to the number of rows."""
        if sum(sizes) != self.num_rows or any(size < 0 for size in sizes):
            raise BatchError(
                f"{type(self).__name__}.split: sizes {list(sizes)} add up to {sum(sizes)}; "
                f"there are {self.num_rows} rows."
            )
        pieces: list[Self] = []
        start = 0
        for size in sizes:
            pieces.append(self.select(range(start, start + size)))
            start += size
        return pieces

    def chunks(self, size: int) -> list[Self]:
        """Consecutive pieces of `size` rows; the last may be smaller. `size` 0 gives one piece."""
        if size < 0:
            raise BatchError(f"{type(self).__name__}.chunks: got size {size}, expected 0 or more.")
        if size == 0 or size >= self.num_rows:
            return [self]
        full, rest = divmod(self.num_rows, size)
        return self.split([size] * full + ([rest] if rest else []))

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """One batch of all rows. BatchError when a shared field disagrees or a row field is only partly there."""
        if not batches:
            raise BatchError(f"{cls.__name__}.concat: nothing to join.")
        first = batches[0]
        if any(type(batch) is not type(first) for batch in batches):
            kinds = sorted({type(batch).__name__ for batch in batches})
            raise BatchError(f"{cls.__name__}.concat: the pieces are of different types: {', '.join(kinds)}.")
        return type(first)._concat(batches)

    @classmethod
    def _concat(cls, batches: Sequence[Any]) -> Self:
        """Implementation of `concat`, called with at least one piece, all of this class."""
        first: Self = batches[0]
        changed: dict[str, Any] = {}
        for item in dataclasses.fields(first):
            name, kind = item.name, item.metadata.get(_KIND)
            values = [getattr(batch, name) for batch in batches]
            where = f"{type(first).__name__}.{name}"
            if kind == "rows":
                changed[name] = join(where, values)
            elif kind == "shared":
                for index, value in enumerate(values[1:], start=1):
                    if not same(values[0], value):
                        raise BatchError(
                            f"{where}: piece 0 has {_brief(values[0])}, piece {index} has {_brief(value)}. "
                            "A shared field must agree in all pieces; join only what was made from one request."
                        )
        return dataclasses.replace(first, **changed)

    def to(self, device: Any) -> Self:
        """The same batch with its tensors, shared ones included, on `device`; itself if they are there.

        To a GPU without waiting for the copies: what uses them there comes after them.
        """
        moved: dict[str, Any] = {}
        for name in _fields(type(self), "rows", "shared"):
            value = getattr(self, name)
            result = _moved(value, device)
            if result is not value:
                moved[name] = result
        return dataclasses.replace(self, **moved) if moved else self

    def computed_on(self, device: Any, change: Callable[[Self], Self], *, home: Any = None) -> Self:
        """`change` of this batch, computed on `device`. What it left as it was stays where it is, and is not copied.

        What it added goes to `home`, or, if that is None, to where the tensors of the batch are that it was added to.
        """
        moved = self.to(device)
        return change(moved)._returned(self, moved, home)

    def _returned(self, original: Self, moved: Self, home: Any) -> Self:
        own_home = next((x.device for x in _tensors(original)), None) if home is None else home
        values: dict[str, Any] = {}
        for name in _fields(type(self), "rows", "shared"):
            value, before = getattr(self, name), getattr(moved, name)
            if value is before:
                values[name] = getattr(original, name)
            elif isinstance(value, Batch) and type(value) is type(before):
                values[name] = value._returned(getattr(original, name), before, home)
            elif own_home is not None:
                values[name] = _moved(value, own_home)
        return dataclasses.replace(self, **values)


def _tensors(batch: Batch) -> Iterator[Any]:
    """Tensors that have an entry per row, without those of nested batches."""
    for name in _fields(type(batch), "rows"):
        value = getattr(batch, name)
        for item in cast("tuple[Any, ...]", value[:1]) if isinstance(value, tuple) else (value,):
            if _is_tensor(item):
                yield item


@cache
def _fields(cls: type[Batch], *kinds: str) -> tuple[str, ...]:
    """Names of the fields of these kinds."""
    return tuple(item.name for item in dataclasses.fields(cls) if item.metadata.get(_KIND) in kinds)


def _moved(value: Any, device: Any) -> Any:
    """The value of a field on a device; the same object if nothing of it moves."""
    if not isinstance(value, Mapping):
        return _moved_item(value, device)
    items = cast(Mapping[Any, Any], value)
    result = {key: _moved(item, device) for key, item in items.items()}
    return result if any(result[key] is not item for key, item in items.items()) else items


def _moved_item(value: Any, device: Any) -> Any:
    if _is_tensor(value):
        if value.device == device:
            return value
        # From a GPU the host waits: it would read memory before it is written.
        return value.to(device, non_blocking=True) if str(device).startswith("cuda") else value.to(device)
    if not isinstance(value, tuple):
        return value.to(device) if isinstance(value, Batch) else value
    items = cast(tuple[Any, ...], value)
    # Ids, prompts and the like are most of what a batch has, and are skipped at once.
    if all(isinstance(item, _PLAIN) for item in items):
        return items
    result = tuple(_moved_item(item, device) for item in items)
    return result if any(new is not old for new, old in zip(result, items, strict=True)) else items


def same(left: Any, right: Any) -> bool:
    """Equality that understands tensors, mappings, tuples and dataclasses; tensors must agree bit for bit."""
    if _is_tensor(left) or _is_tensor(right):
        return _is_tensor(left) and _is_tensor(right) and _same_bits(left, right)
    if all(isinstance(value, Mapping) for value in (left, right)):
        one, other = cast(Mapping[Any, Any], left), cast(Mapping[Any, Any], right)
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if type(left) is not type(right):
        return bool(left == right)
    if type(left) in (tuple, list):
        items, others = cast(Sequence[Any], left), cast(Sequence[Any], right)
        return len(items) == len(others) and all(map(same, items, others))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return bool(left == right)


def _same_bits(left: Any, right: Any) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    import torch

    if left.device == right.device and not (left.is_floating_point() or left.is_complex()):
        return bool(torch.equal(left, right))
    # As bytes: NaN equals itself, and 0.0 differs from -0.0. One of the two may live on a device. A fresh copy, because
    # tensors of one or no element count as contiguous whatever their strides, and then have no view as bytes.
    one, other = (
        torch.empty(left.numel(), dtype=left.dtype, device=left.device).copy_(tensor.detach().reshape(-1))
        for tensor in (left, right)
    )
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "index_select") and hasattr(value, "dtype")


def _apply(value: Any, change: Callable[[Any], Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _apply(item, change) for key, item in cast(Mapping[Any, Any], value).items()}
    return change(value)


def take(value: Any, indices: list[int]) -> Any:
    """The rows of a value of a `rows()` field at `indices`."""
    if isinstance(value, Batch):
        return value.select(indices)
    if _is_tensor(value):
        if indices and indices == list(range(indices[0], indices[0] + len(indices))):
            # Neighbouring rows are a view: splitting a rollout in micro-batches copies nothing.
            return value[indices[0] : indices[0] + len(indices)]
        import torch

        return value.index_select(0, torch.tensor(indices, dtype=torch.int64, device=value.device))
    return tuple(value[i] for i in indices)


def _check_length(owner: str, name: str, value: Any, num_rows: int) -> None:
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            _check_length(owner, f"{name}[{key!r}]", item, num_rows)
        return
    result = value.shape[0] if _is_tensor(value) else len(value)
    if result != num_rows:
        raise BatchError(f"{owner}.{name}: {result} entries for {num_rows} samples; it needs one entry per sample.")


def join(where: str, values: list[Any]) -> Any:
    """Values of a `rows()` field after each other. BatchError, with the path `where`, when they do not fit together."""
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise BatchError(
            f"{where}: piece {absent.index(True)} has none, piece {absent.index(False)} has some. "
            "Fill it in every piece, or in none, before joining."
        )
    first = values[0]
    if isinstance(first, Mapping):
        keys = set(cast(Mapping[str, Any], first))
        for index, value in enumerate(values[1:], start=1):
            if set(value) != keys:
                raise BatchError(
                    f"{where}: piece 0 has keys {sorted(keys)}, piece {index} has {sorted(value)}; they must agree."
                )
        names = cast(Mapping[str, Any], first)
        return {key: join(f"{where}[{key!r}]", [value[key] for value in values]) for key in names}
    if isinstance(first, Batch):
        return type(first).concat(values)
    kinds = {"tensor" if _is_tensor(value) else type(value).__name__ for value in values}
    if len(kinds) > 1:
        raise BatchError(f"{where}: the pieces hold different kinds of values: {', '.join(sorted(kinds))}.")
    if _is_tensor(first):
        import torch

        shapes = {(tuple(value.shape[1:]), value.dtype) for value in values}
        if len(shapes) > 1:
            raise BatchError(f"{where}: the pieces have rows of different shape or dtype: {sorted(map(str, shapes))}.")
        return torch.cat(values)
    return tuple(item for value in values for item in value)


def _brief(value: object) -> str:
    return shortened(" ".join(repr(value).split()), 120)


def inverse(order: Sequence[int]) -> list[int]:
    """The rows that undo an order: `batch.select(order).select(inverse(order))` is the batch. order: a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


def rows_by_group(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """Rows of each group, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    return groups
