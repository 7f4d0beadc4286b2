"""Rows of tensors that lie in another process, as a driver names them. Apart, for processes that import little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Piece", "Rows"]


@dataclass(frozen=True)
class Piece:
    """Fits `unirl.core.roles.PieceLike`."""

    blob: Any
    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    """Rows of kept tensors, in pieces. Fits `unirl.core.roles.RemoteRowsLike`."""

    pieces: tuple[Piece, ...]
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.count for piece in self.pieces), *self.row_shape)

    @classmethod
    def of(cls, tensor: Tensor, *places: tuple[Any, int, int]) -> Rows:
        """Rows like those of `tensor`, of each (name, first row, number of rows) in turn."""
        return cls(tuple(Piece(*place) for place in places), tuple(tensor.shape[1:]), tensor.dtype)
