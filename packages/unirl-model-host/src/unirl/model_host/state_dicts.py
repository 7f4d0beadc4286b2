"""Published state dicts: read without running the code of others, and loaded whole or not at all.

Weights come from safetensors, or from `torch.load(weights_only=True)`: no pickled code is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from unirl.core.errors import RecipeError

__all__ = ["fill", "read_tensors"]


def read_tensors(file: Path, *, key: str) -> dict[str, Tensor]:
    """The tensors of a state dict by name; one under the key `state_dict` is unwrapped."""
    try:
        if file.suffix == ".safetensors":
            load_file = cast(Any, safetensors.torch).load_file
            return load_file(file)
        read: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RecipeError(
            f"{key}: {str(file)!r} holds more than tensors, or is damaged; loading the rest could run code of others, "
            "so it is refused. Fetch the published file again."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        raise RecipeError(f"{key}: {str(file)!r} does not load: {error}. Fetch it again.") from error
    if isinstance(read, dict):
        state = cast("dict[str, Any]", read)
        state = state.get("state_dict", state)
        if isinstance(state, dict) and all(isinstance(value, Tensor) for value in cast("Any", state).values()):
            return cast("dict[str, Tensor]", state)
    raise RecipeError(f"{key}: {str(file)!r} is not a state dict of tensors. Fetch the published file again.")


def fill(
    module: nn.Module, state: Mapping[str, Tensor], *, key: str, file: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Load a state dict, in `dtype`, that must have exactly the tensors of the module, which may be on the meta device.

    Raises RecipeError, naming the first tensor at fault.
    """
    expected = {name: value.shape for name, value in module.state_dict().items()}
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    other = [name for name, shape in expected.items() if name in state and state[name].shape != shape]
    if missing or extra or other:
        faults = (("lacks", missing), ("has the unknown", extra), ("has other shapes, first of", other))
        listed = "; ".join(f"{what} {names[0]!r} and {len(names) - 1} more" for what, names in faults if names)
        raise RecipeError(
            f"{key}: {str(file)!r} is not a whole checkpoint of this scorer: it {listed} ({len(expected)} tensors "
            "expected). Give the published file, or fetch it again."
        )
    # A module on the meta device takes the tensors themselves.
    module.load_state_dict({name: value.to(dtype) for name, value in state.items()}, assign=True)
