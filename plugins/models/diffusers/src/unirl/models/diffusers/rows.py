"""A scalar timestep that has another value for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["RowTimestep"]

_VALUEWISE = frozenset(
    (
        *("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "__neg__", "__add__", "__radd__", "__sub__"),
        *("__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "to", "float", "double"),
        *("half", "bfloat16", "clone", "detach", "contiguous", "type_as"),
    )
)
"""Operations that give each row's value what they give a scalar."""


class RowTimestep(Tensor):
    """Timestep that a pipeline takes for that of its whole batch. `expand` and `repeat` to a multiple of B give the
    rows' own values; arithmetic with scalars maps them. Anything else raises TypeError: rows would be mixed up.
    """

    rows: Tensor
    """[B], the timestep of each row."""

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        result = rows[0].detach().clone().as_subclass(cls)
        result.rows = rows
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "__get__":  # dtype, device, ndim, shape
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = next(value for value in args if isinstance(value, RowTimestep))
        if name == "unsqueeze" or (name == "__getitem__" and args[1] is None):
            return own
        if name in ("expand", "repeat") and len(args) == 2:
            count = args[1] if isinstance(args[1], int) else args[1][0]
            if count % len(own.rows) == 0:
                return own.rows.repeat(count // len(own.rows))
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not own]
        if name not in _VALUEWISE or any(value.ndim for value in others):
            raise TypeError(f"{name} of a timestep that differs between the {len(own.rows)} rows of a batch")
        result: Tensor = func(*map(_values, args), **{key: _values(value) for key, value in kwargs.items()})
        return cls.of(result)


def _values(value: Any) -> Any:
    return value.rows if isinstance(value, RowTimestep) else value
