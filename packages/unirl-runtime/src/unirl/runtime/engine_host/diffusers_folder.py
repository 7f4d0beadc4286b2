"""The checkpoint of an engine for latents: a folder in the diffusers layout."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.core.errors import RecipeError
from unirl.core.hosted import HostedConfig
from unirl.core.roles import Model

from .text_program import Product

__all__ = ["checkpoint_folder"]


def checkpoint_folder(product: Product, config: HostedConfig, model: Model, *, architecture: str) -> Path:
    """The folder that the engine loads: `engine.path`, else that of the model that trains. Raises RecipeError when it
    is not one of the pipeline `architecture`, as its `model_index.json` names it."""
    # diffusers notes on a module which subfolder its weights came from.
    noted = str(getattr(getattr(model.trainable, "config", None), "_name_or_path", "") or "")
    folder = Path(config.path).expanduser() if config.path else Path(noted).parent
    index = folder / "model_index.json"
    if not ((config.path or noted) and index.is_file()):
        raise RecipeError(
            f"engine.path: {product.title} loads a checkpoint from a folder in the diffusers layout; {str(folder)!r} "
            "has no model_index.json. Give engine.path."
        )
    found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if found != architecture:
        raise RecipeError(
            f"engine.path: {str(folder)!r} is a checkpoint of {found!r}; model {model.spec.name!r} is "
            f"{architecture!r} in {product.title}. Give the checkpoint of the model that trains."
        )
    return folder.resolve()
