"""Finding and loading a checkpoint in the transformers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available
from unirl.core.errors import RecipeError
from unirl.numerics.model_files import check_vocabulary, dtype_of, find_checkpoint, no_progress_bars, read_json

from .causal_lm import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from .config import Qwen3Config

__all__ = ["CausalLM", "attention_of", "find", "load_causal_lm", "load_tokenizer"]

CausalLM = Qwen3ForCausalLM | Qwen3MoeForCausalLM

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
_VOCABULARIES = ("tokenizer.json", "vocab.json")


def attention_of(config: Qwen3Config, *, device: torch.device) -> str:
    """The attention implementation, by transformers' name for it. Raises RecipeError for one that cannot run."""
    asked = config.attention
    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if asked == "flash_attention_2" and not has_flash:
        why = "flash-attn is not installed" if device.type == "cuda" else f"the model runs on {device.type}"
        raise RecipeError(f"model.attention: got 'flash_attention_2', but {why}. Use 'sdpa' or 'auto'.")
    if asked != "auto":
        return asked
    is_16_bit = (config.autocast or config.dtype) != "float32"
    return "flash_attention_2" if has_flash and is_16_bit else "sdpa"


def find(config: Qwen3Config) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""

    def fetch(name: str) -> str:
        return snapshot_download(name, revision=config.revision, allow_patterns=list(_FILES))

    return find_checkpoint(config.path, layout="transformers", example="Qwen/Qwen3-0.6B", fetch=fetch)


def load_causal_lm(folder: Path, config: Qwen3Config, *, cls: type[CausalLM], other: str, attention: str) -> CausalLM:
    """The language model of the checkpoint, on the CPU, in evaluation mode.

    cls: the expected class of the checkpoint.  other: the model plugin to suggest for the other Qwen3 class.
    Raises RecipeError, key `model.path`, when the folder holds another model or an incomplete one.
    """
    _check_architecture(folder, cls=cls, other=other)
    try:
        with no_progress_bars(transformers_logging):
            loaded: Any = cls.from_pretrained(
                folder,
                dtype=dtype_of(config.dtype, key="model.dtype", model="qwen3"),
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
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
    check_vocabulary(folder, _VOCABULARIES)
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
            f"model.path: {str(folder)!r} has no config.json, so it is not in the transformers layout. Give "
            "the folder that holds config.json, the weights as .safetensors and the tokenizer."
        )
    result = read_json(file).get("architectures") or []
    if cls.__name__ in result:
        return
    is_other = result[:1] in (["Qwen3ForCausalLM"], ["Qwen3MoeForCausalLM"])
    raise RecipeError(
        f"model.path: {str(folder)!r} is a checkpoint of {', '.join(map(repr, result)) or 'nothing named'}; this model "
        f"loads {cls.__name__!r}. Choose {f'model={other}' if is_other else 'the model plugin of that architecture'}, "
        "or another checkpoint."
    )
