"""Mixed precision: the inputs of a module whose weights compute in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["cast_inputs"]


def cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-forward hook: casts tensors of floats with 2 dims and more, but no timesteps."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value.to(dtype)
        return value

    kept = {key: value for key, value in kwargs.items() if key.startswith("timestep")}
    return tree_map(cast, args), {**tree_map(cast, kwargs), **kept}
