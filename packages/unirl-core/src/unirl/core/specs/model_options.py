"""Settings of a track that only its model has: the dataclass that a spec names for them, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import PluginBroken

if TYPE_CHECKING:
    from .spec import ModelSpec

__all__ = ["options_class", "with_defaults"]


def options_class(model: ModelSpec, track: str) -> type[Any]:
    """The dataclass that the spec names for the options of this track, one of `ModelSpec.options`.

    Raises PluginBroken when it names no dataclass.
    """
    got = f"model {model.name!r} names {model.options[track]!r} as its options"
    module, _, name = model.options[track].partition(":")
    try:
        kind: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginBroken(f"{got}: {error}") from error
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise PluginBroken(f"{got}, expected a dataclass.")
    return kind


def with_defaults(model: ModelSpec, track: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a track by name, in order: the given ones, and the others at their defaults."""
    options: Any = options_class(model, track)(**given)
    return dict(sorted(asdict(options).items()))
