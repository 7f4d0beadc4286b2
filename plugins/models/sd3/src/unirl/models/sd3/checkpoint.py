# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
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


def load_pipeline(folder: Path, config: Sd3Config) -> StableDiffusion3Pipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU.

    Raises RecipeError, key `model.path`, when it is not there, not a Stable Diffusion 3 checkpoint or incomplete.
    """
    text = dtype_of(config.text_dtype, key="model.text_dtype", model="sd3")
    dtypes = {
        "transformer": dtype_of(config.dtype, key="model.dtype", model="sd3"),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype", model="sd3"),
        **{name: text for name in ("text_encoder", "text_encoder_2", "text_encoder_3")},
        "default": torch.float32,
    }
    absent = dict.fromkeys(_T5) if not _check_layout(folder, use_t5=config.use_t5) else {}
    try:
        with no_progress_bars(diffusers_logging, transformers_logging):
            return StableDiffusion3Pipeline.from_pretrained(
                folder, dtype=dtypes, variant=config.variant, local_files_only=True, **absent
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a Stable Diffusion 3 checkpoint, but a component does not load: "
            f"{error} Fetch the checkpoint again, or check model.variant."
        ) from error


def find(config: Sd3Config) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""
    absent = {} if config.use_t5 else dict.fromkeys(_T5)

    def fetch(name: str) -> str | PathLike[str]:
        return StableDiffusion3Pipeline.download(name, revision=config.revision, variant=config.variant, **absent)

    example = "stabilityai/stable-diffusion-3.5-medium"
    return find_checkpoint(config.path, layout="diffusers", example=example, fetch=fetch)


def _check_layout(folder: Path, *, use_t5: bool) -> bool:
    """Raises RecipeError unless all components are there. Returns whether T5 is to be loaded."""
    index = pipeline_index(
        folder, pipeline=_PIPELINE, model="sd3", hint="single-file checkpoints must be converted first"
    )
    has_t5 = use_t5 and all((index.get(name) or [None])[0] is not None for name in _T5)
    missing = [name for name in (*_NEEDED, *(_T5 if has_t5 else ())) if not (folder / name).is_dir()]
    if missing:
        hint = " or set model.use_t5=false to do without T5" if set(missing) <= set(_T5) else ""
        raise RecipeError(
            f"model.path: {str(folder)!r} lacks {', '.join(f'{name}/' for name in missing)}, which its "
            f"model_index.json names. Fetch the whole checkpoint{hint}."
        )
    for name in ("tokenizer", "tokenizer_2", *(["tokenizer_3"] if has_t5 else [])):
        check_vocabulary(folder, _VOCABULARIES, part=name)
    scheduler_config(folder)
    return has_t5
