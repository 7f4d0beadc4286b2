"""Facts of a model's spec that may depend on its checkpoint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import PluginBroken, RecipeError
from ..types.array import Module

if TYPE_CHECKING:
    from .spec import NamesInModule

__all__ = ["adapted_layers", "names_in", "near_endings"]

ALL_WEIGHTS = "Adapters are for torch.nn.Linear alone; name such layers, or train all weights with backend.trains=full"


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


def adapted_layers(
    targets: Sequence[str], layers: Mapping[str, bool], *, module: str, kinds: Mapping[str, str]
) -> list[str]:
    """Names of the layers that LoRA adapts: those whose names end in a target, without frozen ones.

    layers: name of each linear layer -> whether its weight may train.  module: their class, for messages.
    kinds: name of each layer of any kind -> its class, for messages.
    Raises RecipeError, key `backend.lora.targets`, when there is no target, or one that matches no such layer.
    """
    if not targets:
        # Those of blocks, which are numbered.
        endings = sorted({name.split(".")[-1] for name in layers if re.search(r"\.\d+\.", name)})
        raise RecipeError(
            f"backend.lora.targets: got none, and the model has no default targets in {module}. "
            + (f"List endings of its linear layers: {', '.join(endings)}." if endings else f"{ALL_WEIGHTS}.")
        )
    matched: list[str] = []
    for target in targets:
        all_names = [name for name in layers if _ends(name, target)]
        names = [name for name in all_names if layers[name]]
        if all_names and not names:
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches {len(all_names)} layers of {module}, such as "
                f"{all_names[0]!r}, and the model has frozen all of them. Leave it out, or name layers that may train."
            )
        if not names:
            others = sorted({kind for name, kind in kinds.items() if _ends(name, target)})
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches no linear layer of {module}"
                + (f", but {others[0]}. {ALL_WEIGHTS}." if others else f". {near_endings(target, layers)}")
            )
        matched += [name for name in names if name not in matched]
    return matched


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def near_endings(target: str, layers: Iterable[str]) -> str:
    """The endings of these names that are most like a target, as a sentence."""
    endings = sorted({".".join(name.split(".")[-depth:]) for name in layers for depth in (1, 2, 3)})
    near = difflib.get_close_matches(target, endings, n=5, cutoff=0.3) or endings[:5]
    return f"Nearest: {', '.join(near) or 'it has no linear layers'}."
