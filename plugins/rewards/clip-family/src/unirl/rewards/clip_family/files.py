"""Finding the files of a scorer, with one clear error for each way they can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from transformers import AutoTokenizer
from unirl.core.errors import RecipeError
from unirl.model_host.model_files import check_vocabulary, find_checkpoint

__all__ = ["find_file", "find_folder", "load_tokenizer"]

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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RecipeError(f"{key}: the tokenizer in {str(folder)!r} does not load: {error} Fetch it again.") from error
