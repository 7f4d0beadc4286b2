# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError
from unirl.core.model_files import (
    check_vocabulary,
    dtype_of,
    find_checkpoint,
    no_progress_bars,
    pipeline_index,
    read_json,
    scheduler_config,
)

from .config import QwenImageConfig

__all__ = ["find", "load_pipeline"]

_PIPELINE = "QwenImagePipeline"
_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_FURTHER_INPUTS = ("guidance_embeds", "use_additional_t_cond")


def find(config: QwenImageConfig) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""

    def fetch(name: str) -> str | PathLike[str]:
        return QwenImagePipeline.download(name, revision=config.revision, variant=config.variant)

    return find_checkpoint(config.path, layout="diffusers", example="Qwen/Qwen-Image", fetch=fetch)


def load_pipeline(folder: Path, config: QwenImageConfig) -> QwenImagePipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU.

    Raises RecipeError, key `model.path`, when it is not there, incomplete, or of another pipeline or purpose.
    """
    dtypes = {
        "transformer": dtype_of(config.dtype, key="model.dtype", model="qwen-image"),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype", model="qwen-image"),
        "text_encoder": dtype_of(config.text_dtype, key="model.text_dtype", model="qwen-image"),
        "default": torch.float32,
    }
    _check_layout(folder)
    try:
        with no_progress_bars(diffusers_logging, transformers_logging):
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
    pipeline_index(folder, pipeline=_PIPELINE, model="qwen-image")
    missing = [f"{name}/" for name in _PARTS if not (folder / name).is_dir()]
    if missing:
        raise RecipeError(
            f"{where} lacks {', '.join(missing)}, which its model_index.json names. Fetch the whole checkpoint."
        )
    check_vocabulary(folder, _VOCABULARIES, part="tokenizer")
    scheduler_config(folder)
    settings = read_json(folder / "transformer" / "config.json")
    wanted = [key for key in _FURTHER_INPUTS if settings.get(key)]
    if wanted:
        raise RecipeError(
            f"{where} has a transformer with {wanted[0]} = true, an input that text to image does not have. Use a "
            "checkpoint without it, such as 'Qwen/Qwen-Image'."
        )
