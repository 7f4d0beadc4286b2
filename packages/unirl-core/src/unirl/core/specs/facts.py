"""Facts of a model's spec that may depend on its checkpoint."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import PluginBroken
from ..types.array import Module

if TYPE_CHECKING:
    from .spec import NamesInModule

__all__ = ["names_in"]


def names_in(fact: NamesInModule, module: Module) -> tuple[str, ...]:
    """`lora_targets` or `wrap_blocks` of a spec, for its trainable module: as stated, or what the function gives.

    Raises PluginBroken when the function that the spec names cannot be imported, or finds nothing.
    """
    if isinstance(fact, tuple):
        return fact
    where, _, function = fact.partition(":")
    try:
        find = getattr(import_module(where), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginBroken(f"a model's spec names {fact!r}, expected 'package.module:function': {error}") from error
    names = tuple(find(module))
    if not names:
        raise PluginBroken(f"a model's spec names {fact!r}, which found nothing in {type(module).__name__}.")
    return names
