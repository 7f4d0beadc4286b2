"""Arguments and results of a transformer's call: their tensors, their dtype, and zeros of their form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["blank", "cast", "shapes", "tensors"]


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        named = value.get("hidden_states")
        for part in [named] if named is not None else value.values():
            yield from tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of floats with two dims and more: a timestep has fewer, and 16 bits would round it."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.ndim >= 2 else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(part, dtype) for part in value)
    return value


def shapes(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().to("meta")
    if isinstance(result, Mapping):
        return type(result)(**{key: shapes(value) for key, value in result.items()})
    if isinstance(result, (list, tuple)):
        return type(result)(shapes(part) for part in result)
    return result


def blank(result: Any, *, seen: torch.Size, given: Tensor, rows: int) -> Any:
    """Zeros of the form that the transformer's result has: each of its sizes is the input's at that place, or fixed."""
    if isinstance(result, Tensor):
        same = [a == b for a, b in zip(result.shape, seen, strict=False)] if result.ndim == len(seen) else []
        shape = [new if is_same else old for old, new, is_same in zip(result.shape, given.shape, same, strict=False)]
        return torch.zeros(shape or result.shape, dtype=result.dtype, device=given.device)
    if isinstance(result, Mapping):
        return type(result)(**{k: blank(v, seen=seen, given=given, rows=rows) for k, v in result.items()})
    if isinstance(result, list):
        return [blank(result[0], seen=seen, given=given, rows=rows) for _ in range(rows)]
    if isinstance(result, tuple):
        return tuple(blank(part, seen=seen, given=given, rows=rows) for part in result)
    return result
