"""Random weights for a checkpoint in the diffusers layout that has all other files.

Calls diffusers and transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from unirl.core.errors import RecipeError

from ..model_files import no_progress_bars, read_json

__all__ = ["save_random_components"]


def save_random_components(folder: Path, *, seed: int) -> None:
    """Write weights of every network that `model_index.json` names, of the sizes in its config.json; same seed, same
    bytes. Every weight is moved, so that no zero or one of the initialisation hides a term.

    Raises RecipeError, key `model.path`, for a component of neither diffusers nor transformers.
    """
    index = read_json(folder / "model_index.json")
    logs: list[Any] = [import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers")]
    # Their signatures are untyped.
    untyped: Any = torch
    with untyped.random.fork_rng(devices=[]), no_progress_bars(*logs):
        untyped.manual_seed(seed)
        for name, value in sorted(index.items()):
            # Tokenizers, processors and schedulers have no config.json.
            if not isinstance(value, list) or not (folder / name / "config.json").is_file():
                continue
            library, kind = map(str, cast("list[object]", value))
            part = _component(folder / name, library, kind)
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            part.save_pretrained(folder / name)


def _component(folder: Path, library: str, kind: str) -> Any:
    if library not in ("diffusers", "transformers"):
        raise RecipeError(
            f"model.path: {str(folder)!r} is a component of {library!r}, expected one of diffusers or transformers."
        )
    cls: Any = getattr(import_module(library), kind)
    if library == "diffusers":
        return cls.from_config(cls.load_config(folder))
    return cls(cls.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
