"""Loading the processor of a checkpoint: the chat template, the tokenizer, and the images' part of it.

Calls transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from unirl.core.errors import RecipeError

from .image_lm_config import ImageLmConfig

__all__ = ["load_processor"]


def load_processor(folder: Path, config: ImageLmConfig, *, tokenizer: Any, trust_remote_code: bool) -> Any:
    """The processor that transformers would load, without its parts for videos and sound, which need further packages.

    Raises RecipeError, key `model.path`, when a file is missing or the checkpoint has no processor of images, and the
    key of a setting that its image processor does not have.
    """
    images = _image_processor(folder, config, trust_remote_code=trust_remote_code)
    kind = _processor_class(folder, trust_remote_code=trust_remote_code)

    class ImagesAlone(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            plain: Any = super()
            return None if argument is None else plain.check_argument_for_proper_class(argument_name, argument)

    parts = {"image_processor": images, "tokenizer": tokenizer}
    names: list[str] = kind.get_attributes()
    if missing := parts.keys() - set(names):
        raise RecipeError(
            f"model.path: the processor {kind.__name__!r} of {str(folder)!r} has no {' and no '.join(sorted(missing))}"
            ", expected one of images and text. Choose another checkpoint."
        )
    try:
        settings, _ = kind.get_processor_dict(folder, local_files_only=True)
        return ImagesAlone.from_args_and_dict([parts.get(name) for name in names], settings)
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.path: the processor {kind.__name__!r} of {str(folder)!r} does not load: {error} Fetch the "
            "checkpoint again, with processor_config.json and its tokenizer's special tokens."
        ) from error


def _image_processor(folder: Path, config: ImageLmConfig, *, trust_remote_code: bool) -> Any:
    transformers = import_module("transformers")

    def load(**settings: Any) -> Any:
        # Not torchvision's, where that is installed: its pixels differ in the last bits.
        return transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=trust_remote_code, **settings
        )

    try:
        result = load()
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(
            f"model.path: the image processor in {str(folder)!r} does not load: {error} Fetch the checkpoint "
            "again, with preprocessor_config.json."
        ) from error
    budget = {name: getattr(config, name) for name in ("min_pixels", "max_pixels") if getattr(config, name)}
    known = set(result.valid_kwargs.__annotations__) | set(result.to_dict())
    for name in (*budget, *config.image):
        if name not in known:
            key = name if name in budget else f"image.{name}"
            raise RecipeError(
                f"model.{key}: the checkpoint's {type(result).__name__} has no such setting, expected one of "
                f"{', '.join(sorted(known))}. Set model.image with one of these."
            )
    if not budget and not config.image:
        return result
    try:
        return load(**config.image, **budget)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model.image: the checkpoint's {type(result).__name__} does not take it: {error}") from error


def _processor_class(folder: Path, *, trust_remote_code: bool) -> Any:
    transformers = import_module("transformers")
    auto = import_module("transformers.models.auto.processing_auto")
    settings = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    mixin = transformers.ProcessorMixin
    own: dict[str, str] = getattr(settings, "auto_map", None) or {}
    if trust_remote_code and "AutoProcessor" in own:
        load = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
        return load(own["AutoProcessor"], folder, local_files_only=True)
    named = mixin.get_processor_dict(folder, local_files_only=True)[0].get("processor_class")
    name = named or auto.PROCESSOR_MAPPING_NAMES.get(settings.model_type)
    result = getattr(transformers, name or "", None)
    if result is None:
        raise RecipeError(
            f"model.path: transformers has no processor {name!r} for the model type {settings.model_type!r} of "
            f"{str(folder)!r}. Choose another checkpoint."
        )
    return result
