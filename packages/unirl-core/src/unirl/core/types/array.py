"""The tensor type of the track types, named here so that importing them needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = torch.Tensor
    Module: TypeAlias = torch.nn.Module
    Ragged: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
    """[U, ...], or U arrays of any shape."""
else:
    Array = Any
    Module = Any
    Ragged = Any

__all__ = ["Array", "Module", "Ragged"]
