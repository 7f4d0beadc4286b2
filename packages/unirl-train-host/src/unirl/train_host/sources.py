"""The tensors of a module as others know them: without adapters, or folded in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from .export import Source
from .quantize import is_quantized

__all__ = ["plain", "sources_of"]


def sources_of(
    module: nn.Module, held: Iterable[str], *, trains: str, kind: str, is_on: bool = True
) -> dict[str, Source]:
    """Exported name -> source of each tensor of `kind`: full, lora or merged.

    held: names of the module's parameters.  trains: full or lora.  is_on: with the adapters.
    """
    if trains == "full":
        return {name: Source(name=name) for name in held}
    from .adapters import lora_deltas, lora_names, plain_names

    if kind == "lora":
        return {exported: Source(name=name) for exported, name in lora_names(module).items()}
    deltas = lora_deltas(module) if is_on else {}
    return {plain: Source(name=name, delta=deltas.get(name)) for plain, name in plain_names(held).items()}


def plain(tensors: Mapping[str, Tensor], *, trains: str) -> dict[str, Tensor]:
    """Tensors of a module by the names that they have without adapters, without those of adapters and without quantized
    ones, which have their values."""
    if trains == "full":
        return dict(tensors)
    from .adapters import plain_names

    named = {plain: tensors[name] for plain, name in plain_names(tensors).items()}
    return {plain: tensor for plain, tensor in named.items() if not is_quantized(tensor)}
