# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from diffusers import QwenImagePipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError
from unirl.numerics.diffusion.pipeline_config import pipeline_dtypes
from unirl.numerics.model_files import (
    check_filled,
    check_parts,
    check_vocabulary,
    find_checkpoint,
    loading_pipeline,
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
        return QwenImagePipeline.download(name, revision=config.revision, variant=config.variant, use_safetensors=True)

    return find_checkpoint(config.path, layout="diffusers", example="Qwen/Qwen-Image", fetch=fetch)


def load_pipeline(folder: Path, config: QwenImageConfig, parts: Mapping[str, Any]) -> QwenImagePipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU; `parts` in place of its own.

    Raises RecipeError, key `model.path`, when it is not there, incomplete, or of another pipeline or purpose.
    """
    dtypes = pipeline_dtypes(config, model="qwen-image", encoders=("text_encoder",))
    _check_layout(folder)
    with loading_pipeline(
        folder, title="Qwen-Image", logs=(diffusers_logging, transformers_logging), errors=(SafetensorError,)
    ):
        pipeline = QwenImagePipeline.from_pretrained(
            folder, dtype=dtypes, variant=config.variant, local_files_only=True, use_safetensors=True, **parts
        )
    check_filled(folder, pipeline.components, given=parts)
    _check_prefix(pipeline, folder)
    return pipeline


def _check_prefix(pipeline: QwenImagePipeline, folder: Path) -> None:
    """Raises RecipeError unless what stands before the prompt is as many tokens as the pipeline drops after encoding.

    With another vocabulary a part of the template would be left in, or the beginning of every prompt cut off.
    """
    tokenizer: Any = pipeline.tokenizer
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    result, dropped = len(tokenizer(prefix)["input_ids"]), pipeline.prompt_template_encode_start_idx
    if result != dropped:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} makes {result} tokens of the text before the prompt, and "
            f"QwenImagePipeline drops {dropped}. Use the tokenizer of Qwen2.5-VL."
        )


def _check_layout(folder: Path) -> None:
    pipeline_index(folder, pipeline=_PIPELINE, model="qwen-image")
    check_parts(folder, _PARTS)
    check_vocabulary(folder, _VOCABULARIES, part="tokenizer")
    scheduler_config(folder)
    settings = read_json(folder / "transformer" / "config.json")
    expected = [key for key in _FURTHER_INPUTS if settings.get(key)]
    if expected:
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with {expected[0]} = true, an input that text to image "
            "does not have. Use a checkpoint without it, such as 'Qwen/Qwen-Image'."
        )
