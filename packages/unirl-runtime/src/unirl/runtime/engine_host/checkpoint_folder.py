"""The folder of the checkpoint that an engine loads: the layout of transformers for text, of diffusers for latents."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.core.errors import RecipeError
from unirl.core.hosted import HostedConfig
from unirl.core.roles import Model

from .program import Product

__all__ = ["diffusers_folder", "transformers_folder"]


def transformers_folder(product: Product, config: HostedConfig, model: Model) -> Path:
    """The folder that the engine loads: `engine.path`, else that of the model that trains. Raises RecipeError without
    one."""
    # transformers notes on a module where its weights came from.
    found = config.path or str(getattr(model.trainable, "name_or_path", ""))
    folder = Path(found).expanduser()
    if found and (folder / "config.json").is_file():
        return folder.resolve()
    raise RecipeError(
        f"engine.path: {product.title} loads a checkpoint from a folder in the transformers layout; {found!r} is none. "
        "Give engine.path."
    )


def diffusers_folder(product: Product, config: HostedConfig, model: Model, *, architecture: str) -> Path:
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
