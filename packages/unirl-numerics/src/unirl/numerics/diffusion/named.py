"""Kernels and guidances by name: a short one of this package, or `module:Class` of a plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from unirl.core.limits import broken_limits
from unirl.core.names import did_you_mean

__all__ = ["check_limits", "class_of", "made", "name_of", "options_of"]

T = TypeVar("T")


def class_of(name: str, *, known: Mapping[str, type[T]], base: type[T], what: str) -> type[T]:
    """The class with this name; imports the module of `module:Class`.

    known: short name -> class.  base: what the class inherits.  what: `kernel` or `guidance`, for messages.
    Raises ValueError for a name that leads to nothing, or to something else than a dataclass that inherits `base`.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"{what} '{name}' is not known; choose one of {', '.join(known)}, or `module:Class` of a plugin"
            f"{did_you_mean(name, known) or '.'}"
        )
    try:
        result: Any = import_module(module)
        for part in attribute.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} '{name}': it cannot be imported: {error}.") from error
    if not (isinstance(result, type) and issubclass(result, base) and dataclasses.is_dataclass(result)):
        raise ValueError(
            f"{what} '{name}': got {result!r}, expected a frozen dataclass that inherits "
            f"{base.__module__}.{base.__qualname__}."
        )
    return result


def name_of(cls: type[Any], known: Mapping[str, type[Any]]) -> str:
    """The name under which `class_of` gives this class."""
    short = next((name for name, one in known.items() if one is cls), None)
    return short or f"{cls.__module__}:{cls.__qualname__}"


def options_of(cls: type[Any], *, main: str) -> list[str]:
    """Names of the settings of a class except its main one, which sampling has a key for."""
    assert dataclasses.is_dataclass(cls)
    return [field.name for field in dataclasses.fields(cls) if field.init and field.name != main]


def made(cls: type[T], *, main: Mapping[str, Any], known: Sequence[str], options: Mapping[str, Any], what: str) -> T:
    """An object of the class with these settings.  known: names that options may have.

    Raises ValueError for an unknown or a missing option, and for one out of its limits.
    """
    unknown = sorted(set(options) - set(known))
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{what}: option '{unknown[0]}' is not known; its options are: {listed}.")
    try:
        return cls(**main, **options)
    except TypeError as error:
        raise ValueError(f"{what}: {error}.") from error


def check_limits(part: Any, *, what: str) -> None:
    """Raises ValueError for a setting that is out of the limits of its field."""
    for reason in broken_limits(part, key=""):
        raise ValueError(f"{what}: {reason}")
