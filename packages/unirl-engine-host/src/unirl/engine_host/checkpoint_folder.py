"""The checkpoint folder an engine loads: transformers layout for text, diffusers layout for latents."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.core.errors import RecipeError
from unirl.core.roles import Model
from unirl.engine_host.config import ExternalConfig
from unirl.model_host.model_files import check_contained

from .program import Product

__all__ = ["READS_IMAGES", "diffusers_folder", "transformers_folder"]

READS_IMAGES = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Architectures whose images the text engines take as training has them, processed, and whose weights they name as
training does. Both engines name the weights of other vision towers otherwise, and split their images by other rules."""


def transformers_folder(product: Product, config: ExternalConfig, model: Model) -> Path:
    """The folder the engine loads: `engine.path`, by default that of the trained model. Raises RecipeError if there is
    none, or one whose files are elsewhere, and for a model that reads images of an architecture that is not in
    `READS_IMAGES`."""
    # transformers records on a module where its weights came from.
    result = config.path or str(getattr(model.trainable, "name_or_path", ""))
    folder = Path(result).expanduser()
    if result and (folder / "config.json").is_file():
        check_contained(folder, key="engine.path")
        if model.spec.reads_media("text"):
            _check_images(product, folder)
        return folder.resolve()
    raise RecipeError(
        f"engine.path: {product.title} loads a checkpoint from a folder in the transformers layout, got {result!r}. "
        "Give engine.path."
    )


def diffusers_folder(product: Product, config: ExternalConfig, model: Model, *, architecture: str) -> Path:
    """The folder the engine loads: `engine.path`, by default that of the trained model. Raises RecipeError unless its
    `model_index.json` names the pipeline `architecture`."""
    # diffusers records on a module which subfolder its weights came from.
    noted = str(getattr(getattr(model.trainable, "config", None), "_name_or_path", "") or "")
    folder = Path(config.path).expanduser() if config.path else Path(noted).parent
    index = folder / "model_index.json"
    if not ((config.path or noted) and index.is_file()):
        raise RecipeError(
            f"engine.path: {product.title} loads a checkpoint from a folder in the diffusers layout; {str(folder)!r} "
            "has no model_index.json. Set engine.path."
        )
    check_contained(folder, key="engine.path")
    result = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if result != architecture:
        raise RecipeError(
            f"engine.path: {str(folder)!r} is a checkpoint of {result!r}; model {model.spec.name!r} is "
            f"{architecture!r} in {product.title}. Set engine.path to a checkpoint of the trained model."
        )
    return folder.resolve()


def _check_images(product: Product, folder: Path) -> None:
    named: list[str] = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    if not set(named) & set(READS_IMAGES):
        raise RecipeError(
            f"engine: {product.title} is not given images of {', '.join(named) or 'an unnamed architecture'}, expected "
            f"one of {', '.join(READS_IMAGES)}: of others it names weights and divides images otherwise than training. "
            "Use engine=trainside."
        )
