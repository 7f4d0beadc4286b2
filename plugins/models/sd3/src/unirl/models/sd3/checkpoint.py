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
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError

from .config import Sd3Config

_PIPELINE = "StableDiffusion3Pipeline"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
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
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str, *, key: str) -> torch.dtype:
    """The torch dtype of that name. Raises RecipeError, which names `key`, for any other."""
    if name not in _DTYPES:
        raise RecipeError(f"{key}: {name!r} is not a dtype that sd3 takes; use one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def load_pipeline(folder: Path, config: Sd3Config) -> StableDiffusion3Pipeline:
    """All components of the checkpoint in `folder`, each in its dtype, on the CPU.

    Raises RecipeError, key `model.path`, when it is not there, not a Stable Diffusion 3 checkpoint or incomplete.
    """
    text = dtype_of(config.text_dtype, key="model.text_dtype")
    dtypes = {
        "transformer": dtype_of(config.dtype, key="model.dtype"),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype"),
        **{name: text for name in ("text_encoder", "text_encoder_2", "text_encoder_3")},
        "default": torch.float32,
    }
    absent = dict.fromkeys(_T5) if not _check_layout(folder, use_t5=config.use_t5) else {}
    try:
        with _no_progress_bars():
            return StableDiffusion3Pipeline.from_pretrained(
                folder, dtype=dtypes, variant=config.variant, local_files_only=True, **absent
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a Stable Diffusion 3 checkpoint, but a component does not load: "
            f"{error} Fetch the checkpoint again, or check model.variant."
        ) from error


def find(config: Sd3Config) -> Path:
    """The folder of the checkpoint; a hub id is fetched, or taken from the local cache when there is no network.

    Everything is read from that folder, so a hub id and a local path cannot differ.
    """
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(config.path):
        raise RecipeError(
            f"model.path: there is no folder {config.path!r}, and it is not a hub id either. Give a folder in the "
            "diffusers layout, or an id such as 'stabilityai/stable-diffusion-3.5-medium'."
        )
    absent = {} if config.use_t5 else dict.fromkeys(_T5)
    try:
        fetched = StableDiffusion3Pipeline.download(
            config.path, revision=config.revision, variant=config.variant, **absent
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise RecipeError(
            f"model.path: there is no folder {config.path!r}, and the hub does not give it: {error} Check the name, "
            "log in where the model asks for it, or give a folder in the diffusers layout."
        ) from error
    return Path(fetched)


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `scheduler_config.json`."""
    return _json(folder / "scheduler" / "scheduler_config.json")


def _check_layout(folder: Path, *, use_t5: bool) -> bool:
    """Raises RecipeError unless all components are there. Returns whether T5 is to be loaded."""
    where = f"model.path: {str(folder)!r}"
    if not (folder / "model_index.json").is_file():
        raise RecipeError(
            f"{where} has no model_index.json, so it is not in the diffusers layout. Give the folder that holds "
            "transformer/, vae/, scheduler/ and the text encoders; single-file checkpoints must be converted first."
        )
    index = _json(folder / "model_index.json")
    if index.get("_class_name") != _PIPELINE:
        raise RecipeError(
            f"{where} is a checkpoint of {index.get('_class_name')!r}; sd3 loads {_PIPELINE!r}. "
            "Choose the model plugin of that pipeline, or another checkpoint."
        )
    has_t5 = use_t5 and all((index.get(name) or [None])[0] is not None for name in _T5)
    missing = [name for name in (*_NEEDED, *(_T5 if has_t5 else ())) if not (folder / name).is_dir()]
    if missing:
        hint = " or set model.use_t5=false to do without T5" if set(missing) <= set(_T5) else ""
        raise RecipeError(
            f"{where} lacks {', '.join(f'{name}/' for name in missing)}, which its model_index.json names. "
            f"Fetch the whole checkpoint{hint}."
        )
    for name in ("tokenizer", "tokenizer_2", *(["tokenizer_3"] if has_t5 else [])):
        # transformers makes an empty tokenizer of a folder without one, and every prompt would look the same.
        if not any((folder / name / file).is_file() for file in _VOCABULARIES):
            raise RecipeError(
                f"{where} has no vocabulary in {name}/ ({', '.join(_VOCABULARIES)}). Fetch the whole checkpoint."
            )
    scheduler_config(folder)
    return has_t5


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
