"""Selection of rows from any cache of transformers: keys and values, and the states of convolutions and recurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, cast

from torch import Tensor

__all__ = ["select_rows"]


def select_rows(cache: Any, rows: Tensor) -> Any:
    """The cache with these rows [B'] of its B, which may repeat; changed in place where it is no tuple.

    cache: of transformers or of a checkpoint's own code, or a nested structure of states, each batch first.
    """
    states = [state for state in _states(cache) if state.dim() > 1]
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache(rows)
    if not states:
        return cache
    # Some classes leave a part of their states: MiniMax its linear attention, DeepSeek-V4 its compressors.
    batch, left = len(states[0]), {id(state) for state in states}

    def select(state: Tensor) -> Tensor:
        is_left = id(state) in left and len(state) == batch
        return state.index_select(0, rows.to(state.device)) if is_left else state

    return _replaced(cache, select)


def _states(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, dict):
        for value in cast("dict[Any, Any]", part).values():
            yield from _states(value)
    elif isinstance(part, (list, tuple)):
        for value in cast("list[Any]", part):
            yield from _states(value)
    elif _holds_states(part):
        yield from _states(vars(part))


def _replaced(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, dict):
        values = cast("dict[Any, Any]", part)
        values.update({key: _replaced(value, change) for key, value in values.items()})
    elif isinstance(part, list):
        entries = cast("list[Any]", part)
        entries[:] = [_replaced(value, change) for value in entries]
    elif isinstance(part, tuple):
        return tuple(_replaced(value, change) for value in cast("tuple[Any, ...]", part))
    elif _holds_states(part):
        _replaced(vars(part), change)
    return part


def _holds_states(part: Any) -> bool:
    caches = import_module("transformers.cache_utils")
    return isinstance(part, (caches.Cache, caches.CacheLayerMixin, caches.LinearAttentionCacheLayerMixin))
