"""Which layers LoRA adapts and which blocks are wrapped, found in the transformer as it was loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import cast

from torch import nn

__all__ = ["lora_targets", "wrap_blocks"]

_ATTENTION = re.compile(r"(?:^|\.)((?:\w*attn\w*|\w*attention\w*)\..*)$")


def wrap_blocks(module: nn.Module) -> tuple[str, ...]:
    """Class names of blocks with attention that are in a list, those that diffusers names as blocks where it names
    any. `_no_split_modules` alone would also give embeddings and norms."""
    listed = dict.fromkeys(
        type(child).__name__
        for part in module.modules()
        if isinstance(part, nn.ModuleList)
        for child in part
        if any(_ATTENTION.search(f"{name}.") for name, _ in _named(child))
    )
    attributes = ("_repeated_blocks", "_no_split_modules")
    own = {name for key in attributes for name in cast("Iterable[str]", getattr(module, key, None) or ())}
    return tuple(name for name in listed if name in own) or tuple(listed)


def lora_targets(module: nn.Module) -> tuple[str, ...]:
    """Endings of the names of all linear layers of attention in those blocks; the full name where an ending would also
    match something else, as a `to_out` that is a layer in one block and a list in another."""
    blocks = [part for part in module.modules() if type(part).__name__ in wrap_blocks(module)]
    endings = dict.fromkeys(
        found[1]
        for block in blocks
        for name, part in _named(block)
        if isinstance(part, nn.Linear) and (found := _ATTENTION.search(name))
    )
    every = dict(_named(module))
    result: list[str] = []
    for ending in endings:
        hit = [name for name in every if name.endswith(f".{ending}")]
        is_plain = all(isinstance(every[name], nn.Linear) for name in hit)
        result += [ending] if is_plain else [name for name in hit if isinstance(every[name], nn.Linear)]
    return tuple(result)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules`, whose type torch leaves open."""
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules())
