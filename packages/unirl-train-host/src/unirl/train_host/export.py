"""Whole weights for engines, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from unirl.core.types.weights import MadeTensors

from .quantize import dequantized
from .sharding import full

__all__ = ["Delta", "Source", "gathered"]


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
