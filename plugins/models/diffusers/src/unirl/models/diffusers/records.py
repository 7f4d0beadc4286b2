"""Outputs of a pipeline's encoders, as conditions with a row for each prompt, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .session import Record

__all__ = ["SHARED", "Layout"]

SHARED = "shared"
"""Condition [n] int64: rows go together where it is equal."""


@dataclass(frozen=True)
class _Leaf:
    name: str
    axis: int | None
    """The axis of the batch; None is a tensor that all prompts share."""


@dataclass(frozen=True)
class _Rows:
    """A list with one tensor for each prompt."""

    name: str


@dataclass(frozen=True)
class _Parts:
    kind: type
    parts: tuple[Any, ...]


@dataclass
class Layout:
    """Where the rows of prompts lie in a record, found by encoding a prompt once and twice, and another one; and what
    rows a run may have."""

    calls: list[tuple[str, Any]]
    """Name of each method, and the nodes of its result; all else is a constant."""
    ragged: set[str] = field(default_factory=lambda: set[str]())
    """Names of conditions whose shape depends on the prompt."""
    unshared: set[str] = field(default_factory=lambda: set[str]())
    """Names of values that the rows of a run have in common, and that depend on the prompt: rows where they differ run
    one after another."""
    is_single: bool = False
    """Every row needs a separate run."""
    takes_row_sigmas: bool = True
    """Whether the rows of a run may differ in sigma. If not, there is a forward for each sigma."""

    @property
    def is_split(self) -> bool:
        """Rows of a batch may need separate runs."""
        return bool(self.ragged or self.unshared or self.is_single or not self.takes_row_sigmas)

    @classmethod
    def found(cls, one: Record, two: Record | None, others: Sequence[Record]) -> Layout:
        """one, two: of a prompt, once and twice; None where the pipeline takes one prompt only.  others: of other
        prompts.

        Raises ValueError for values whose rows cannot be told apart.
        """
        is_single = two is None
        two = one if two is None else two
        names = [[name for name, _ in record] for record in (one, two, *others)]
        if any(other != names[0] for other in names):
            raise ValueError(f"its encoders are called as {names}, which depends on the prompts")
        result = cls([
            (name, _node(f"{name}.{index}", value, twice))
            for index, ((name, value), (_, twice)) in enumerate(zip(one, two, strict=True))
        ])  # fmt: skip
        flat = [result._flat(record) for record in (one, *others)]
        shared = [leaf.name for _, node in result.calls for leaf in _leaves(node) if leaf.axis is None]
        result.is_single = is_single
        result.unshared = {
            name
            for name in shared
            if not is_single and any(not torch.equal(flat[0][name], other[name]) for other in flat)
        }
        result.ragged = {name for name, value in flat[0].items() if any(value.shape != o[name].shape for o in flat)}
        return result

    def conditions(self, records: Sequence[Record]) -> dict[str, Any]:
        """Conditions of one record for each prompt: name -> [n, ...], or n tensors of any shape."""
        rows = [self._flat(record) for record in records]
        result: dict[str, Any] = {
            name: tuple(row[name] for row in rows) if name in self.ragged else torch.stack([row[name] for row in rows])
            for name in rows[0]
        }
        if self.unshared:
            result[SHARED] = torch.tensor([_digest([row[name] for name in sorted(self.unshared)]) for row in rows])
        return result

    def record(self, conditions: Mapping[str, Any]) -> Record:
        """Record that the pipeline would have been given for these rows."""
        return [(name, _joined(node, conditions)) for name, node in self.calls]

    def _flat(self, record: Record) -> dict[str, Tensor]:
        return {
            name: value
            for (_, node), (_, result) in zip(self.calls, record, strict=True)
            for name, value in _flat(node, result)
        }


def _digest(values: Sequence[Tensor]) -> int:
    content = hashlib.sha256(b"".join(value.contiguous().view(torch.uint8).cpu().numpy().tobytes() for value in values))
    return int.from_bytes(content.digest()[:7])


def _node(name: str, one: Any, two: Any) -> Any:
    if isinstance(one, Tensor):
        axes = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if b == 2 * a and a]
        if not axes and one.shape != two.shape:
            raise ValueError(f"{name} is {list(one.shape)} for one prompt and {list(two.shape)} for two")
        return _Leaf(name, axes[0] if axes else None)
    if isinstance(one, list) and len(one) == 1 and len(two) == 2 and isinstance(one[0], Tensor):
        return _Rows(name)
    if isinstance(one, (list, tuple)) and len(one) == len(two):
        pairs = zip(one, two, strict=True)
        return _Parts(type(one), tuple(_node(f"{name}.{index}", a, b) for index, (a, b) in enumerate(pairs)))
    if one != two:
        raise ValueError(f"{name} is {one!r} for one prompt and {two!r} for two")
    return one


def _leaves(node: Any) -> Iterator[_Leaf]:
    if isinstance(node, _Leaf):
        yield node
    elif isinstance(node, _Parts):
        for part in node.parts:
            yield from _leaves(part)


def _flat(node: Any, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, _Leaf):
        yield node.name, value
    elif isinstance(node, _Rows):
        yield node.name, value[0]
    elif isinstance(node, _Parts):
        for part, own in zip(node.parts, value, strict=True):
            yield from _flat(part, own)
    elif node != value:
        raise ValueError(f"an encoder returned {value!r} where other prompts got {node!r}")


def _joined(node: Any, conditions: Mapping[str, Any]) -> Any:
    if isinstance(node, _Leaf):
        rows = list(conditions[node.name])
        return rows[0] if node.axis is None else torch.cat(rows, dim=node.axis)
    if isinstance(node, _Rows):
        return list(conditions[node.name])
    if isinstance(node, _Parts):
        return node.kind(_joined(part, conditions) for part in node.parts)
    return node
