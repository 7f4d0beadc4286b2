# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from diffusers import WanPipeline
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

from .config import Wan21Config

__all__ = ["find", "load_pipeline"]

_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_VOCABULARIES = ("tokenizer.json", "spiece.model")
_WAN22 = ("boundary_ratio", "expand_timesteps")
_IMAGE = ("image_dim", "added_kv_proj_dim")
_EXAMPLE = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


def find(config: Wan21Config) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""

    def fetch(name: str) -> str | PathLike[str]:
        return WanPipeline.download(name, revision=config.revision, variant=config.variant, use_safetensors=True)

    return find_checkpoint(config.path, layout="diffusers", example=_EXAMPLE, fetch=fetch)


def load_pipeline(folder: Path, config: Wan21Config, parts: Mapping[str, Any]) -> WanPipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU; `parts` in place of its own.

    Raises RecipeError, key `model.path`, when it is not there, incomplete, or of another pipeline or purpose.
    """
    dtypes = pipeline_dtypes(config, model="wan21", encoders=("text_encoder",))
    _check_layout(folder)
    with loading_pipeline(
        folder, title="Wan 2.1", logs=(diffusers_logging, transformers_logging), errors=(SafetensorError,)
    ):
        pipeline = WanPipeline.from_pretrained(
            folder, dtype=dtypes, variant=config.variant, local_files_only=True, use_safetensors=True, **parts
        )
    check_filled(folder, pipeline.components, given=parts)
    return pipeline


def _check_layout(folder: Path) -> None:
    index = pipeline_index(folder, pipeline="WanPipeline", model="wan21", hint=f"{_EXAMPLE!r} is in that layout")
    check_parts(folder, _PARTS)
    check_vocabulary(folder, _VOCABULARIES, part="tokenizer")
    scheduler_config(folder)
    settings = read_json(folder / "transformer" / "config.json")
    reasons = [(key, "Wan 2.2") for key in _WAN22 if index.get(key)]
    reasons += [(key, "image to video") for key in _IMAGE if settings.get(key)]
    for key, purpose in reasons:
        raise RecipeError(
            f"model.path: {str(folder)!r} is a checkpoint for {purpose}, by its {key}; expected Wan 2.1 for text to "
            f"video, such as {_EXAMPLE!r}."
        )
