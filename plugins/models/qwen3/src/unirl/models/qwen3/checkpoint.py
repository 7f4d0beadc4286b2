"""Finding and loading a checkpoint in the transformers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available
from unirl.core.errors import RecipeError

from .causal_lm import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from .config import Qwen3Config

__all__ = ["CausalLM", "attention_of", "dtype_of", "find", "load_causal_lm", "load_tokenizer", "no_progress_bars"]

CausalLM = Qwen3ForCausalLM | Qwen3MoeForCausalLM

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")


def dtype_of(name: str, *, key: str) -> torch.dtype:
    """The torch dtype of that name. Raises RecipeError, which names `key`, for any other."""
    if name not in _DTYPES:
        raise RecipeError(f"{key}: {name!r} is not a dtype that qwen3 takes; use one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def attention_of(config: Qwen3Config, *, device: torch.device) -> str:
    """The attention implementation, by transformers' name for it. Raises RecipeError for one that cannot run."""
    asked = config.attention
    if asked not in _ATTENTIONS:
        raise RecipeError(f"model.attention: {asked!r} was asked for; use one of {', '.join(_ATTENTIONS)}.")
    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if asked == "flash_attention_2" and not has_flash:
        why = "flash-attn is not installed" if device.type == "cuda" else f"the model runs on {device.type}"
        raise RecipeError(f"model.attention: 'flash_attention_2' was asked for, but {why}. Use 'sdpa' or 'auto'.")
    if asked != "auto":
        return asked
    is_16_bit = (config.autocast or config.dtype) != "float32"
    return "flash_attention_2" if has_flash and is_16_bit else "sdpa"


def find(config: Qwen3Config) -> Path:
    """The folder of the checkpoint; a hub id is fetched, or taken from the local cache when there is no network."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    what = f"model.path: there is no folder {config.path!r}"
    if not _HUB_ID.fullmatch(config.path):
        raise RecipeError(
            f"{what}, and it is not a hub id either. Give a folder in the transformers layout, or an id such as "
            "'Qwen/Qwen3-0.6B'."
        )
    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=list(_FILES)))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise RecipeError(
            f"{what}, and the hub does not give it: {error} Check the name, log in where the model asks for it, or "
            "give a folder in the transformers layout."
        ) from error


def load_causal_lm(folder: Path, config: Qwen3Config, *, cls: type[CausalLM], other: str, attention: str) -> CausalLM:
    """The language model of the checkpoint, on the CPU, in evaluation mode.

    cls: the class that the checkpoint must be of.  other: the model to choose for the other one.
    Raises RecipeError, key `model.path`, when the folder holds something else or not all of it.
    """
    _check_architecture(folder, cls=cls, other=other)
    try:
        with no_progress_bars():
            loaded: Any = cls.from_pretrained(
                folder,
                dtype=dtype_of(config.dtype, key="model.dtype"),
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a Qwen3 checkpoint, but it does not load: {error} Fetch it again."
        ) from error
    model, report = cast("tuple[CausalLM, dict[str, Any]]", loaded)
    # transformers makes weights up for those that it does not find.
    missing = sorted(report["missing_keys"])
    if missing:
        raise RecipeError(
            f"model.path: the weights in {str(folder)!r} lack {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}. Fetch the whole checkpoint."
        )
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer. Raises RecipeError, key `model.path`, when there is none or it does not load."""
    # transformers makes an empty tokenizer of a folder without one, and every prompt would look the same.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise RecipeError(
            f"model.path: {str(folder)!r} has no tokenizer ({' or '.join(_VOCABULARIES)}). Fetch the whole checkpoint."
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} does not load: {error} Fetch it again."
        ) from error


def _check_architecture(folder: Path, *, cls: type[CausalLM], other: str) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise RecipeError(
            f"model.path: {str(folder)!r} has no config.json, so it is no checkpoint in the transformers layout. Give "
            "the folder that holds config.json, the weights as .safetensors and the tokenizer."
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise RecipeError(f"model.path: {str(file)!r} cannot be read as a JSON object: {error}") from error
    if cls.__name__ in found:
        return
    is_other = found[:1] in (["Qwen3ForCausalLM"], ["Qwen3MoeForCausalLM"])
    raise RecipeError(
        f"model.path: {str(folder)!r} is a checkpoint of {', '.join(map(repr, found)) or 'nothing named'}; this model "
        f"loads {cls.__name__!r}. Choose {f'model={other}' if is_other else 'the model plugin of that architecture'}, "
        "or another checkpoint."
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Bars would tear up the display of the run; the library's own setting is restored."""
    is_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            transformers_logging.enable_progress_bar()
