# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError

from .config import QwenImageConfig

__all__ = ["dtype_of", "find", "load_pipeline", "scheduler_config"]

_PIPELINE = "QwenImagePipeline"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_FURTHER_INPUTS = ("guidance_embeds", "use_additional_t_cond")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str, *, key: str) -> torch.dtype:
    """The torch dtype of that name. Raises RecipeError, which names `key`, for any other."""
    if name not in _DTYPES:
        raise RecipeError(f"{key}: {name!r} is not a dtype that qwen-image takes; use one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def find(config: QwenImageConfig) -> Path:
    """The folder of the checkpoint; a hub id is fetched, or taken from the local cache when there is no network.

    Everything is read from that folder, so a hub id and a local path cannot differ. Raises RecipeError when there is
    neither.
    """
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    what = f"model.path: there is no folder {config.path!r}"
    if not _HUB_ID.fullmatch(config.path):
        raise RecipeError(
            f"{what}, and it is not a hub id either. Give a folder in the diffusers layout, or an id such as "
            "'Qwen/Qwen-Image'."
        )
    try:
        return Path(QwenImagePipeline.download(config.path, revision=config.revision, variant=config.variant))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise RecipeError(
            f"{what}, and the hub does not give it: {error} Check the name, log in where the model asks for it, or "
            "give a folder in the diffusers layout."
        ) from error


def load_pipeline(folder: Path, config: QwenImageConfig) -> QwenImagePipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU.

    Raises RecipeError, key `model.path`, when it is not there, incomplete, or of another pipeline or purpose.
    """
    dtypes = {
        "transformer": dtype_of(config.dtype, key="model.dtype"),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype"),
        "text_encoder": dtype_of(config.text_dtype, key="model.text_dtype"),
        "default": torch.float32,
    }
    _check_layout(folder)
    try:
        with _no_progress_bars():
            pipeline = QwenImagePipeline.from_pretrained(
                folder, dtype=dtypes, variant=config.variant, local_files_only=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a Qwen-Image checkpoint, but a component does not load: {error} "
            "Fetch the checkpoint again, or check model.variant."
        ) from error
    _check_prefix(pipeline, folder)
    return pipeline


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `scheduler_config.json`."""
    return _json(folder / "scheduler" / "scheduler_config.json")


def _check_prefix(pipeline: QwenImagePipeline, folder: Path) -> None:
    """Raises RecipeError unless what stands before the prompt is as many tokens as the pipeline drops after encoding.

    With another vocabulary a part of the template would be left in, or the beginning of every prompt cut off.
    """
    tokenizer: Any = pipeline.tokenizer
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    found, dropped = len(tokenizer(prefix)["input_ids"]), pipeline.prompt_template_encode_start_idx
    if found != dropped:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} makes {found} tokens of the text before the prompt, and "
            f"QwenImagePipeline drops {dropped}. Use the tokenizer of Qwen2.5-VL."
        )


def _check_layout(folder: Path) -> None:
    where = f"model.path: {str(folder)!r}"
    if not (folder / "model_index.json").is_file():
        raise RecipeError(
            f"{where} has no model_index.json, so it is not in the diffusers layout. Give the folder that holds "
            "transformer/, vae/, scheduler/, tokenizer/ and text_encoder/."
        )
    found = _json(folder / "model_index.json").get("_class_name")
    if found != _PIPELINE:
        raise RecipeError(
            f"{where} is a checkpoint of {found!r}; qwen-image loads {_PIPELINE!r}. Choose the model plugin of that "
            "pipeline, or another checkpoint."
        )
    missing = [f"{name}/" for name in _PARTS if not (folder / name).is_dir()]
    if missing:
        raise RecipeError(
            f"{where} lacks {', '.join(missing)}, which its model_index.json names. Fetch the whole checkpoint."
        )
    # transformers makes an empty tokenizer of a folder without one, and every prompt would look the same.
    if not any((folder / "tokenizer" / file).is_file() for file in _VOCABULARIES):
        raise RecipeError(
            f"{where} has no vocabulary in tokenizer/ ({', '.join(_VOCABULARIES)}). Fetch the whole checkpoint."
        )
    scheduler_config(folder)
    settings = _json(folder / "transformer" / "config.json")
    wanted = [key for key in _FURTHER_INPUTS if settings.get(key)]
    if wanted:
        raise RecipeError(
            f"{where} has a transformer with {wanted[0]} = true, an input that text to image does not have. Use a "
            "checkpoint without it, such as 'Qwen/Qwen-Image'."
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """One bar a component would tear up the display of the run; each library's own setting is restored."""
    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {str(path)!r} cannot be read as JSON: {error}") from error
