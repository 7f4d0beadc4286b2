"""Whole weights for engines, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from unirl.core.types.weights import MadeTensors

from .quantize import dequantized, is_quantized
from .sharding import full

__all__ = ["Delta", "Source", "gathered", "plain", "sources_of"]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The addition of an adapter to a weight: scale (B A)."""

    a: str
    """Names of A and B in the module."""
    b: str
    scale: float
    """alpha / rank."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of an exported tensor."""

    name: str
    """Name of a parameter in the module."""
    delta: Delta | None = None


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


def gathered(
    sources: Mapping[str, Source],
    *,
    held: Mapping[str, Tensor],
    shard_of: Callable[[str], Tensor],
    dtypes: Mapping[str, str],
) -> MadeTensors:
    """The whole tensors by their exported names, in the order of these. Making one is collective.

    held: the module's parameters by name.  shard_of: this rank's shard of a parameter, of the policy to export.
    dtypes: exported name -> dtype by torch's name, to which a tensor is rounded; others keep theirs.
    """

    def dtype_of(name: str) -> torch.dtype:
        return getattr(torch, dtypes[name]) if name in dtypes else held[sources[name].name].dtype

    @torch.no_grad()
    def made(name: str) -> Tensor:
        return whole(sources[name]).to(dtype_of(name))

    def whole(source: Source) -> Tensor:
        weight = full(dequantized(shard_of(source.name)))
        if source.delta is None:
            return weight
        change = full(shard_of(source.delta.b)) @ full(shard_of(source.delta.a))
        # In fp32, rounded once to the dtype of the weight.
        return (weight.float() + change * source.delta.scale).to(weight.dtype)

    forms = {name: held[source.name] for name, source in sorted(sources.items())}
    return MadeTensors(
        {name: partial(made, name) for name in forms},
        forms={name: torch.empty(form.shape, dtype=dtype_of(name), device="meta") for name, form in forms.items()},
    )
