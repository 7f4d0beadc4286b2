"""Finding and loading a language model in the transformers layout, with one clear error for each way it can be wrong.

Calls transformers and huggingface_hub, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from unirl.core.errors import RecipeError

from ..attention import OF_TRANSFORMERS, is_flash
from ..lazy_weights import CheckpointValues, Piece, empty_parameters, weight_files
from ..model_files import check_vocabulary, dtype_of, find_checkpoint, no_progress_bars, read_json
from .causal_lm_config import CausalLmConfig

__all__ = [
    "architectures",
    "attention_of",
    "check_architecture",
    "empty_causal_lm",
    "find",
    "load_causal_lm",
    "load_tokenizer",
]

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "LICENSE*", "README.md")
_VOCABULARIES = ("tokenizer.json", "vocab.json")


def attention_of(config: CausalLmConfig, *, device: torch.device, cls: Any) -> str:
    """The attention implementation, by transformers' name for it. Raises RecipeError for one that cannot run.

    cls: of transformers, which says what it supports: attention with sinks or capped scores has no sdpa.
    """
    asked = config.attention
    supports = {
        "flash": bool(getattr(cls, "_supports_flash_attn", False)),
        "flex_attention": bool(getattr(cls, "_supports_flex_attn", False)),
        "sdpa": bool(getattr(cls, "_supports_sdpa", False)),
        "eager": True,
    }
    if asked != "auto":
        kind = "flash" if is_flash(asked) else asked
        if not supports[kind]:
            usable = [name for name in OF_TRANSFORMERS if supports["flash" if is_flash(name) else name]]
            raise RecipeError(
                f"model.attention: got {asked!r}, which {cls.__name__} of transformers does not support. Use "
                f"{' or '.join(map(repr, ['auto', *usable]))}."
            )
        # torch has a backward pass of flex attention on GPUs alone.
        if kind in ("flash", "flex_attention") and device.type != "cuda":
            raise RecipeError(
                f"model.attention: got {asked!r}, but the model runs on {device.type}. Use 'sdpa' or 'auto'."
            )
        return asked
    is_installed = import_module("transformers.utils.import_utils").is_flash_attn_2_available
    is_16_bit = (config.autocast or config.dtype) != "float32"
    if device.type == "cuda" and is_16_bit and supports["flash"] and is_installed():
        return "flash_attention_2"
    return "sdpa" if supports["sdpa"] else "eager"


def find(config: CausalLmConfig, *, example: str) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id. example: such an id."""

    def fetch(name: str) -> str:
        hub = import_module("huggingface_hub")
        return hub.snapshot_download(name, revision=config.revision, allow_patterns=list(_FILES))

    return find_checkpoint(config.path, layout="transformers", example=example, fetch=fetch)


def load_causal_lm(folder: Path, config: CausalLmConfig, *, cls: Any, attention: str) -> Any:
    """The language model of the checkpoint, on the CPU, in evaluation mode.

    cls: the class to load, named as the checkpoint names its architecture.
    Raises RecipeError, key `model.path`, when it does not load or is incomplete.
    """
    try:
        with no_progress_bars(import_module("transformers.utils").logging):
            model, report = cls.from_pretrained(
                folder,
                dtype=dtype_of(config.dtype, key="model.dtype", model=config.use or cls.__name__),
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a checkpoint of {cls.__name__!r}, but it does not load: {error} "
            "Fetch it again."
        ) from error
    # transformers makes weights up for those that it does not find.
    missing = sorted(report["missing_keys"])
    if missing:
        raise RecipeError(
            f"model.path: the weights in {str(folder)!r} lack {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}. Fetch the whole checkpoint."
        )
    return model.eval()


def empty_causal_lm(
    folder: Path, config: CausalLmConfig, *, cls: Any, attention: str, renames: Mapping[str, str]
) -> tuple[Any, CheckpointValues]:
    """The same module with its parameters on the meta device, without values, and where the values are. renames: see
    `CheckpointValues`.

    Raises RecipeError, key `model.path`, when the checkpoint does not have exactly the tensors of the module.
    """
    dtype = dtype_of(config.dtype, key="model.dtype", model=config.use or cls.__name__)
    settings = cls.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # As `from_pretrained` records it: external engines load the same folder.
    settings.name_or_path = str(folder)
    with empty_parameters(dtype), no_progress_bars(import_module("transformers.utils").logging):
        model = cls._from_config(settings, dtype=dtype, attn_implementation=attention)
    if (folder / "generation_config.json").is_file():
        generation = import_module("transformers").GenerationConfig
        model.generation_config = generation.from_pretrained(folder, local_files_only=True)
    values = CheckpointValues(model, weight_files(folder, "model"), pieces=_expert_pieces, renames=renames)
    return model.eval(), values


def _expert_pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Checkpoints store every expert by itself; transformers joins the experts of a layer, gate and up after each
    other: [experts, 2 width, hidden], and [experts, hidden, width] on the way down."""
    layer, _, kind = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    if not layer or not parts:
        return []
    num_experts, rows, columns = shape
    size = (1, rows // len(parts), columns)
    return [
        Piece(name=f"{layer}.experts.{expert}.{part}.weight", start=(expert, number * size[1], 0), size=size)
        for expert in range(num_experts)
        for number, part in enumerate(parts)
    ]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer. trust_remote_code: run the checkpoint's own code for it.

    Raises RecipeError, key `model.path`, when there is none or it does not load."""
    check_vocabulary(folder, _VOCABULARIES)
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} does not load: {error} Fetch it again."
        ) from error


def architectures(folder: Path) -> list[str]:
    """Class names of the checkpoint in its config.json. Raises RecipeError, key `model.path`, without that file."""
    file = folder / "config.json"
    if not file.is_file():
        raise RecipeError(
            f"model.path: {str(folder)!r} has no config.json, so it is not in the transformers layout. Give "
            "the folder that holds config.json, the weights as .safetensors and the tokenizer."
        )
    return read_json(file).get("architectures") or []


def check_architecture(folder: Path, *, name: str, siblings: Mapping[str, str]) -> None:
    """Raise RecipeError unless the folder holds a checkpoint of the architecture `name`.

    siblings: architectures that other models of the plugin load -> the name of the model.
    """
    result = architectures(folder)
    if name in result:
        return
    sibling = next((model for other, model in siblings.items() if result[:1] == [other]), "")
    raise RecipeError(
        f"model.path: {str(folder)!r} is a checkpoint of {', '.join(map(repr, result)) or 'nothing named'}; this model "
        f"loads {name!r}. Choose {f'model={sibling}' if sibling else 'the model plugin of that architecture'}, or "
        "another checkpoint."
    )
