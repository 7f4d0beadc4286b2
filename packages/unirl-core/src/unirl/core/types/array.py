"""The tensor type of the track types, named here so that importing them needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = torch.Tensor
    Module: TypeAlias = torch.nn.Module
else:
    Array = Any
    Module = Any

__all__ = ["Array", "Module"]
