"""Limits of settings: declared on the fields of config dataclasses, and checked by one function.

    lr: float = limit(1e-4, above=0)
    betas: list[float] = limit([0.9, 0.999], least=0, below=1, length=2)
    mode: str = one_of("all", "fraction", default="all")

`match` checks every section of a plan, and a part's `build` checks its config again with `check_config`. Numbers that
are not finite and integers of more than 63 bits are refused in every field. A class that gives an inherited field
another default keeps its limits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

from .names import did_you_mean

__all__ = ["LARGEST_INT", "Limit", "Reason", "broken_limits", "limit", "limit_of", "one_of"]

T = TypeVar("T")
D = TypeVar("D")

LARGEST_INT = 2**63 - 1
"""Largest integer that torch, NumPy and JSON readers can hold."""
_METADATA = "unirl.limit"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a plan or a config is refused."""

    key: str
    """Key path that decides it. For a part's own settings it begins with a dot, as in `.lora.rank`, and the part's key
    path is put before it."""
    text: str
    """The value found, the values expected and what to do, in a sentence or two."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"

    def under(self, key: str) -> Reason:
        """The reason with the whole key path, given the part's."""
        return dataclasses.replace(self, key=f"{key}{self.key}") if self.key.startswith(".") else self


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The values that a field may have: a range, or one of a few. In a list, each item."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[str | int, ...] = ()
    length: int | None = None
    """Items of a list; None is any number of them."""
    hint: str = ""
    """Advice on a value that is refused, in place of naming the default."""

    def admits(self, value: object) -> bool:
        """Whether a value lies within the limit."""
        items = _items(value)
        if items is not None:
            return self.length in (None, len(items)) and all(self.admits(item) for item in items)
        if self.choices:
            return value in self.choices
        # Not isfinite(), which cannot take integers of any length.
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
            return False
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        if self.choices:
            expected = f"one of {', '.join(map(str, self.choices))}"
        elif self.least is not None and self.most is not None:
            expected = f"{_number(self.least)} to {_number(self.most)}"
        else:
            bounds = [
                f"more than {_number(self.above)}" if self.above is not None else "",
                f"{_number(self.least)} or more" if self.least is not None else "",
                f"less than {_number(self.below)}" if self.below is not None else "",
                f"at most {_number(self.most)}" if self.most is not None else "",
            ]
            expected = " and ".join(bound for bound in bounds if bound)
        return expected if self.length is None else f"{self.length} values, each {expected}"


def limit(
    default: T,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    length: int | None = None,
    hint: str = "",
) -> T:
    """A number, or a list or mapping of numbers, within a range; None passes where the field's type has it."""
    bounds = Limit(above=above, least=least, below=below, most=most, length=length, hint=hint)
    assert default is None or bounds.admits(default), f"{default!r} is not {bounds}"
    return _field(default, bounds)


def one_of(*choices: str | int, default: D) -> D:
    """One of a few values; None passes where the field's type has it."""
    bounds = Limit(choices=choices)
    assert default is None or bounds.admits(default), f"{default!r} is not {bounds}"
    return _field(default, bounds)


def _field(default: D, bounds: Limit) -> D:
    metadata = {_METADATA: bounds}
    if isinstance(default, dict):
        named: dict[str, Any] = default  # pyright: ignore[reportUnknownVariableType]
        return field(default_factory=lambda: dict(named), metadata=metadata)  # pyright: ignore[reportReturnType]  # a D
    if isinstance(default, list):
        items: list[Any] = default  # pyright: ignore[reportUnknownVariableType]
        return field(default_factory=lambda: list(items), metadata=metadata)  # pyright: ignore[reportReturnType]  # a D
    return field(default=default, metadata=metadata)


@cache
def limit_of(config: type[Any], name: str) -> Limit | None:
    """The limit of a field, its own or the one that it inherits."""
    for cls in config.__mro__:
        if dataclasses.is_dataclass(cls):
            for item in dataclasses.fields(cls):
                if item.name == name and _METADATA in item.metadata:
                    return item.metadata[_METADATA]
    return None


def broken_limits(config: object, *, key: str) -> Iterator[Reason]:
    """A reason for each value of a config dataclass that is out of its limits, with what is nested in it.

    key: path of the config, which begins those of its fields; empty at the top.
    """
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    for item in dataclasses.fields(config):
        path = f"{key}.{item.name}" if key else item.name
        value, bounds = getattr(config, item.name), limit_of(type(config), item.name)
        if bounds is None:
            yield from _broken(value, path)
        elif isinstance(value, Mapping):
            named: Mapping[str, object] = value  # pyright: ignore[reportUnknownVariableType]
            for name, one in named.items():
                if not bounds.admits(one):
                    yield Reason(key=f"{path}.{name}", text=_refusal(one, bounds, item))
        elif not (bounds.admits(value) or (value is None and "None" in str(item.type))):
            yield Reason(key=path, text=_refusal(value, bounds, item))


def _broken(value: object, path: str) -> Iterator[Reason]:
    """A reason for each value in a field without a limit that no field may have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from broken_limits(value, key=path)
    elif isinstance(value, Mapping):
        named: Mapping[object, object] = value  # pyright: ignore[reportUnknownVariableType]
        for name, item in named.items():
            yield from _broken(item, f"{path}.{name}")
    elif (items := _items(value)) is not None:
        for place, item in enumerate(items):
            yield from _broken(item, f"{path}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Reason(key=path, text=f"got {value}, expected a finite number.")
    elif isinstance(value, int) and abs(value) > LARGEST_INT:
        yield Reason(key=path, text=f"got {value}, expected a whole number of at most {LARGEST_INT}.")


def _refusal(value: object, bounds: Limit, item: dataclasses.Field[Any]) -> str:
    values = _items(value) or [value]
    finite = "a finite number, " if any(isinstance(one, float) and not math.isfinite(one) for one in values) else ""
    text = f"got {value!r}, expected {finite}{bounds}{', or null' if 'None' in str(item.type) else ''}"
    if isinstance(value, str) and (meant := did_you_mean(value, [str(choice) for choice in bounds.choices])):
        return f"{text}{meant}"
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return f"{text}. {bounds.hint or f'The default is {_shown(default)}.'}"


def _items(value: Any) -> list[object] | None:
    """Items of a list, or values of a mapping; None for anything else."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, object]", value).values())
    return list(cast("list[object]", value)) if isinstance(value, list | tuple) else None


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: object) -> str:
    """The value as in a recipe."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
