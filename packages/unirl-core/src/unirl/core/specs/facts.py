"""Facts of a model's spec that may depend on its checkpoint."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import PluginBroken, RecipeError
from ..types.array import Module

if TYPE_CHECKING:
    from .spec import NamesInModule

__all__ = ["names_in"]


def names_in(fact: NamesInModule, module: Module, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """`lora_targets` or `wrap_blocks` of a spec, for its trainable module: as stated, or what the function gives.

    Raises PluginBroken when the function that the spec names cannot be imported, and RecipeError when it finds nothing
    in the module, unless it may.
    """
    if isinstance(fact, tuple):
        return fact
    where, _, function = fact.partition(":")
    try:
        find = getattr(import_module(where), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginBroken(f"a model's spec names {fact!r}, expected 'package.module:function': {error}") from error
    names = tuple(find(module))
    if not names and not may_be_empty:
        raise RecipeError(
            f"model: {function!r}, by which the spec names parts, finds none in {type(module).__name__}. Choose a "
            "checkpoint of another architecture, or write a model plugin that names them."
        )
    return names
