# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.model_host.diffusion.pipeline_config import pipeline_dtypes
from unirl.model_host.model_files import (
    check_filled,
    check_parts,
    check_vocabulary,
    find_checkpoint,
    loading_pipeline,
    pipeline_index,
    scheduler_config,
)

from .config import Sd3Config

_PIPELINE = "StableDiffusion3Pipeline"
_NEEDED = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)
_T5 = ("text_encoder_3", "tokenizer_3")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")


def load_pipeline(folder: Path, config: Sd3Config, parts: Mapping[str, Any]) -> StableDiffusion3Pipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU; `parts` in place of its own.

    Raises RecipeError, key `model.path`, when it is not there, not a Stable Diffusion 3 checkpoint or incomplete.
    """
    dtypes = pipeline_dtypes(config, model="sd3", encoders=("text_encoder", "text_encoder_2", "text_encoder_3"))
    absent = dict.fromkeys(_T5) if not _check_layout(folder, use_t5=config.use_t5) else {}
    with loading_pipeline(
        folder, title="Stable Diffusion 3", logs=(diffusers_logging, transformers_logging), errors=(SafetensorError,)
    ):
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            folder,
            dtype=dtypes,
            variant=config.variant,
            local_files_only=True,
            use_safetensors=True,
            **{**parts, **absent},
            trust_remote_code=False,
        )
    check_filled(folder, pipeline.components, given=parts)
    return pipeline


def find(config: Sd3Config) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""
    absent = {} if config.use_t5 else dict.fromkeys(_T5)

    def fetch(name: str) -> str | PathLike[str]:
        return StableDiffusion3Pipeline.download(
            name, revision=config.revision, variant=config.variant, use_safetensors=True, **absent
        )

    example = "stabilityai/stable-diffusion-3.5-medium"
    return find_checkpoint(config.path, layout="diffusers", example=example, fetch=fetch)


def _check_layout(folder: Path, *, use_t5: bool) -> bool:
    """Raises RecipeError unless all components are there. Returns whether T5 is to be loaded."""
    index = pipeline_index(
        folder, pipeline=_PIPELINE, model="sd3", hint="single-file checkpoints must be converted first"
    )
    has_t5 = use_t5 and all((index.get(name) or [None])[0] is not None for name in _T5)
    check_parts(folder, _NEEDED)
    check_parts(folder, _T5 if has_t5 else (), instead="or set model.use_t5=false to do without T5")
    for name in ("tokenizer", "tokenizer_2", *(["tokenizer_3"] if has_t5 else [])):
        check_vocabulary(folder, _VOCABULARIES, part=name)
    scheduler_config(folder)
    return has_t5
