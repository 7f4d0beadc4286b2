"""Facts of a model's spec that may depend on its checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import PluginBroken, RecipeError
from ..types.array import Module

if TYPE_CHECKING:
    from .spec import NamesInModule

__all__ = ["adapted_layers", "names_in", "near_endings"]


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


def adapted_layers(targets: Sequence[str], layers: Mapping[str, bool], *, module: str) -> list[str]:
    """Names of the layers that LoRA adapts: those whose names end in a target, without frozen ones.

    layers: name of each linear layer -> whether its weight may train.  module: their class, for messages.
    Raises RecipeError, key `backend.lora.targets`, when there is no target, or one that matches no such layer.
    """
    if not targets:
        raise RecipeError(
            "backend.lora.targets: got none, and the model has no default targets; "
            "list endings of its linear layers, such as [to_q,to_k,to_v]."
        )
    matched: list[str] = []
    for target in targets:
        all_names = [name for name in layers if name == target or name.endswith("." + target)]
        names = [name for name in all_names if layers[name]]
        if all_names and not names:
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches {len(all_names)} layers of {module}, such as "
                f"{all_names[0]!r}, and the model has frozen all of them. Leave it out, or name layers that may train."
            )
        if not names:
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches no linear layer of {module}. {near_endings(target, layers)}"
            )
        matched += [name for name in names if name not in matched]
    return matched


def near_endings(target: str, layers: Iterable[str]) -> str:
    """The endings of these names that are most like a target, as a sentence."""
    endings = sorted({".".join(name.split(".")[-depth:]) for name in layers for depth in (1, 2, 3)})
    near = difflib.get_close_matches(target, endings, n=5, cutoff=0.3) or endings[:5]
    return f"Nearest: {', '.join(near) or 'it has no linear layers'}."
