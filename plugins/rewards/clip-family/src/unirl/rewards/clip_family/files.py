"""Finding and reading the files of a scorer, with one clear error for each way they can be wrong.

Weights come from safetensors, or from `torch.load(weights_only=True)`: no pickled code is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer
from unirl.core.errors import RecipeError
from unirl.numerics.model_files import check_vocabulary, find_checkpoint

__all__ = ["fill", "find_file", "find_folder", "load_tokenizer", "read_tensors"]

_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")


def find_folder(path: str, *, key: str, example: str, files: Sequence[str] = _FILES) -> Path:
    """The folder of a checkpoint; a hub id is fetched. files: patterns of those needed."""

    def fetch(name: str) -> str:
        return snapshot_download(name, allow_patterns=list(files))

    return find_checkpoint(path, layout="transformers", example=example, fetch=fetch, key=key)


def find_file(path: str, *, key: str, example: str) -> Path:
    """A local file, or one on the hub as `owner/name/file`."""
    file = Path(path).expanduser()
    if path and file.is_file():
        return file
    owner, _, rest = path.partition("/")
    name, _, inside = rest.partition("/")
    where = f"{key}: there is no file {path!r}" if path else f"{key}: got no file"
    if not (owner and name and inside) or path.startswith("~"):
        raise RecipeError(
            f"{where}. Give a file, or one on the hub as owner/name/file; the published one is {example}."
        )
    try:
        return Path(hf_hub_download(f"{owner}/{name}", inside))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{where}, and it cannot be fetched from the hub: {error} Check the name.") from error


def load_tokenizer(folder: Path, *, key: str) -> Any:
    """The folder's tokenizer. Raises RecipeError when there is none or it does not load."""
    check_vocabulary(folder, _VOCABULARIES, key=key)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RecipeError(f"{key}: the tokenizer in {str(folder)!r} does not load: {error} Fetch it again.") from error


def read_tensors(file: Path, *, key: str) -> dict[str, Tensor]:
    """The tensors of a state dict by name; one under the key `state_dict` is unwrapped."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RecipeError(
            f"{key}: {str(file)!r} holds more than tensors, or is damaged; loading the rest could run code of others, "
            "so it is refused. Fetch the published file again."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        raise RecipeError(f"{key}: {str(file)!r} does not load: {error}. Fetch it again.") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise RecipeError(f"{key}: {str(file)!r} is not a state dict of tensors. Fetch the published file again.")
    return state


def fill(module: nn.Module, state: Mapping[str, Tensor], *, key: str, file: Path) -> None:
    """Load a state dict that must have exactly the tensors of the module. The error names the first at fault."""
    expected = {name: value.shape for name, value in module.state_dict().items()}
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    other = [name for name, shape in expected.items() if name in state and state[name].shape != shape]
    if missing or extra or other:
        faults = (("lacks", missing), ("has the unknown", extra), ("has other shapes, first of", other))
        listed = "; ".join(f"{what} {names[0]!r} and {len(names) - 1} more" for what, names in faults if names)
        raise RecipeError(
            f"{key}: {str(file)!r} is not a whole checkpoint of this scorer: it {listed} ({len(expected)} tensors "
            "expected). Give the published file, or fetch it again."
        )
    # A module on the meta device takes the tensors themselves, published in fp16 or fp32.
    module.load_state_dict({name: value.float() for name, value in state.items()}, assign=True)
