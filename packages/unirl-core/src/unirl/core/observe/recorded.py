"""Recorded values, read with checks: run folders come from other machines and other people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["Recorded"]

LARGEST = 2**53
"""Integers up to it are exact as floating-point numbers."""
DEEPEST = 50
"""Levels of nested values."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A JSON object. Every method raises ValueError, with where it is and the key, for another value than expected."""

    where: str
    """File and line."""
    values: Mapping[str, Any]
    path: str = ""
    """Key path before those of the values, with a dot at its end."""

    def text(self, key: str, *, default: str | None = None) -> str:
        """default: of an absent key, which is refused without one."""
        value = self.values.get(key, default)
        return value if isinstance(value, str) else self._refuse(key, "a text")

    def optional_text(self, key: str) -> str | None:
        return None if self.values.get(key) is None else self.text(key)

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty for an absent key."""
        values = self._list(key)
        if not all(isinstance(value, str) for value in values):
            self._refuse(key, "a list of texts")
        return values

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def count(self, key: str) -> int:
        """A whole number from 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            return self._refuse(key, "a whole number from 0 to 2**53")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.count(key)

    def number(self, key: str, *, most: float = math.inf) -> float:
        """A number, which may be infinite or NaN; with `most` one from 0 to it."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._refuse(key, "a number")
        try:
            result = float(value)
        except OverflowError:
            return self._refuse(key, "a number up to 1.8e308")
        return result if most == math.inf or 0 <= result <= most else self._refuse(key, f"0 to {most:g}")

    def optional_number(self, key: str, *, most: float = math.inf) -> float | None:
        return None if self.values.get(key) is None else self.number(key, most=most)

    def numbers(self, key: str, *, most: float = math.inf) -> dict[str, float]:
        """Numbers by name; none for an absent key. most: see `number`."""
        section = self.section(key)
        is_free = most == math.inf
        # Most are floats, and a long run has millions.
        return {
            name: value if type(value) is float and (is_free or 0 <= value <= most) else section.number(name, most=most)
            for name, value in section.values.items()
        }

    def label(self, key: str) -> str:
        """A text or a number, as it is shown."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return self._refuse(key, "a text or a number")
        return f"{value:g}" if isinstance(value, float) else str(value)

    def section(self, key: str) -> Recorded:
        """An object in this one; an empty one for an absent key."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._refuse(key, "an object")
        return Recorded(where=self.where, values=cast("dict[str, Any]", value), path=f"{self.path}{key}.")

    def sections(self, key: str) -> list[Recorded]:
        """A list of objects; empty for an absent key."""
        values = self._list(key)
        if not all(isinstance(value, dict) for value in values):
            self._refuse(key, "a list of objects")
        return [
            Recorded(where=self.where, values=value, path=f"{self.path}{key}[{at}].") for at, value in enumerate(values)
        ]

    def nested(self, key: str) -> Mapping[str, Any]:
        """An object of any values, of at most `DEEPEST` levels; an empty one for an absent key."""
        result = self.section(key).values
        level: list[Any] = [result]
        for _ in range(DEEPEST):
            level = [child for value in level for child in _children(value)]
        if level:
            self._refuse(key, f"at most {DEEPEST} levels")
        return result

    def _list(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        return cast("list[Any]", value) if isinstance(value, list) else self._refuse(key, "a list")

    def _refuse(self, key: str, expected: str) -> Any:
        if key not in self.values:
            raise ValueError(f"{self.where}: {self.path}{key}: got none, expected {expected}.")
        value = self.values[key]
        # Not the content of a list or an object: it may be nested without end.
        shown = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise ValueError(f"{self.where}: {self.path}{key}: got {shown}, expected {expected}.")


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else ()
