"""Types of a converter: source rows, examples, dropped rows, and the description of a set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from unirl.core.errors import DataError

__all__ = ["INSTRUCTION", "Dropped", "Example", "PromptSet", "SourceRow", "as_list", "as_object"]

INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One row of a source file."""

    name: str
    """`<file name>:<row>`, rows counted from 0."""
    folder: Path
    """Base of relative paths in the row."""
    values: Mapping[str, Any]

    def text(self, column: str) -> str:
        """The text of a column, without white space at its ends; empty for null. Raises DataError for another type."""
        value = self.values[column]
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(column, "text", value)
        return value.strip()

    def image(self, column: str, value: object) -> bytes:
        """The file of an image of a column, which is in the row or beside the source: an object with `bytes` and
        `path`, or a path. Raises DataError for anything else."""
        fields = as_object(value) or {"path": value}
        data, path = fields.get("bytes"), fields.get("path")
        if isinstance(data, bytes) and data:
            return data
        if isinstance(path, str) and path and (file := self.folder / path).is_file():
            return file.read_bytes()
        raise self.wrong(column, "image files: their bytes, or paths that start at the source's folder", value)

    def wrong(self, column: str, wanted: str, found: object) -> DataError:
        shown = repr(found)
        return DataError(
            f"{self.folder / self.name}: column {column!r} must be {wanted}; got "
            f"{shown if len(shown) <= 80 else shown[:77] + '...'}."
        )


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with its answer, or an instruction, which has none."""

    question: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further values kept from the row."""
    images: tuple[bytes, ...] = ()
    """Image files that belong to the question."""


@dataclass(frozen=True)
class Dropped:
    """A row that gives no prompt."""

    reason: str
    """A few words, the same for all rows of this kind: they are counted by it."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A published set, and how its rows are read."""

    name: str
    summary: str
    columns: tuple[tuple[str, ...], ...]
    """Columns that a source must have; each entry lists alternatives, of which one is enough."""
    also: tuple[str, ...] = ()
    """Optional columns."""
    read: Callable[[SourceRow], Example | Dropped]
    instruction: str = INSTRUCTION
    """Appended to every question unless the caller gives another one; may be empty."""
    role: Literal["condition", "source"] = "condition"
    """Role of the images: those that a question is about, or those that are edited."""


def as_object(value: object) -> dict[str, Any] | None:
    """A nested value as what it must be, or None."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """A nested value as what it must be, or None."""
    return cast(list[Any], value) if isinstance(value, list) else None
