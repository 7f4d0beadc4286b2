"""The files that a model is loaded from: where they are, what they say, and one clear error for each way to be wrong.

Every error is of the key `model.path`, but for a dtype's. The libraries that fetch and load belong to the model's
plugin, which hands over what is needed of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import RecipeError

if TYPE_CHECKING:
    import torch

    from .pipeline_config import PipelineConfig

__all__ = [
    "DTYPES",
    "ProgressLog",
    "check_parts",
    "check_vocabulary",
    "dtype_of",
    "find_checkpoint",
    "loading_pipeline",
    "no_progress_bars",
    "pipeline_dtypes",
    "pipeline_index",
    "read_json",
    "scheduler_config",
    "wrong_dtypes",
]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DTYPES = ("float32", "bfloat16", "float16")
"""Names of dtypes that a recipe may give."""


class ProgressLog(Protocol):
    """The logging module of diffusers or of transformers, `<library>.utils.logging`."""

    def is_progress_bar_enabled(self) -> bool: ...
    def disable_progress_bar(self) -> None: ...
    def enable_progress_bar(self) -> None: ...


def find_checkpoint(path: str, *, layout: str, example: str, fetch: Callable[[str], str | PathLike[str]]) -> Path:
    """The folder of a checkpoint; a hub id is fetched, or taken from the local cache when there is no network.

    layout: `diffusers` or `transformers`.  example: an id, for messages.  fetch: gives the folder of an id; it raises
    OSError or ValueError, as the hub's client does, when it cannot.
    Everything is to be read from the folder, so that a hub id and a local path cannot differ.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    what = f"model.path: there is no folder {path!r}"
    if not _HUB_ID.fullmatch(path):
        raise RecipeError(
            f"{what}, and it is not a hub id either. Give a folder in the {layout} layout, or an id such as "
            f"{example!r}."
        )
    try:
        return Path(fetch(path))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{what}, and the hub does not give it: {error} Check the name, log in where the model asks for it, or "
            f"give a folder in the {layout} layout."
        ) from error


def pipeline_index(folder: Path, *, pipeline: str, model: str, hint: str = "") -> dict[str, Any]:
    """The `model_index.json` of a checkpoint in the diffusers layout, which must be one of the class `pipeline`.

    hint: what to do with a folder that has none, as a clause.
    """
    where = f"model.path: {str(folder)!r}"
    if not (folder / "model_index.json").is_file():
        raise RecipeError(
            f"{where} has no model_index.json, so it is not in the diffusers layout. Give the folder that holds "
            f"transformer/, vae/, scheduler/, the tokenizers and the text encoders{f'; {hint}' if hint else ''}."
        )
    index = read_json(folder / "model_index.json")
    found = index.get("_class_name")
    if found != pipeline:
        raise RecipeError(
            f"{where} is a checkpoint of {found!r}; {model} loads {pipeline!r}. Choose the model plugin of that "
            "pipeline, or another checkpoint."
        )
    return index


def check_parts(folder: Path, names: Sequence[str], *, instead: str = "") -> None:
    """Raise RecipeError unless a checkpoint in the diffusers layout has a folder for each of these components.

    instead: what to do rather than fetch them, as a clause that begins with "or".
    """
    missing = [f"{name}/" for name in names if not (folder / name).is_dir()]
    if missing:
        raise RecipeError(
            f"model.path: {str(folder)!r} lacks {', '.join(missing)}, which its model_index.json names. Fetch the "
            f"whole checkpoint{f' {instead}' if instead else ''}."
        )


def pipeline_dtypes(config: PipelineConfig, *, model: str, encoders: Sequence[str]) -> dict[str, torch.dtype]:
    """The dtype of each component, as diffusers' `from_pretrained` takes them; fp32 for what no setting is about.

    encoders: names of the text encoders.  Raises RecipeError for a setting that is no dtype.
    """
    import torch

    text = dtype_of(config.text_dtype, key="model.text_dtype", model=model)
    return {
        "transformer": dtype_of(config.dtype, key="model.dtype", model=model),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype", model=model),
        **dict.fromkeys(encoders, text),
        "default": torch.float32,
    }


@contextmanager
def loading_pipeline(
    folder: Path, *, title: str, logs: Sequence[ProgressLog], errors: tuple[type[Exception], ...]
) -> Generator[None]:
    """Around diffusers' `from_pretrained`: no progress bars, and RecipeError for a component that does not load.

    title: of the model, as its authors write it.  errors: that a library raises for a damaged file, besides OSError
    and ValueError.
    """
    try:
        with no_progress_bars(*logs):
            yield
    except (OSError, ValueError, *errors) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a {title} checkpoint, but a component does not load: {error} "
            "Fetch the checkpoint again, or check model.variant."
        ) from error


def check_vocabulary(folder: Path, names: Sequence[str], *, part: str = "") -> None:
    """Raise RecipeError for a tokenizer without any file of `names`, of which one is enough.

    part: folder of the checkpoint that the tokenizer is in, where it has one of its own.

    transformers makes an empty tokenizer of such a folder, and every prompt would look the same.
    """
    if not any((folder / part / name).is_file() for name in names):
        where = f" in {part}/" if part else ""
        raise RecipeError(
            f"model.path: {str(folder)!r} has no vocabulary{where} ({' or '.join(names)}). Fetch the whole checkpoint."
        )


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The `scheduler_config.json` of a checkpoint in the diffusers layout."""
    return read_json(folder / "scheduler" / "scheduler_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises RecipeError when the file is absent, or anything else."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise RecipeError(f"model.path: {str(path)!r} is a {type(found).__name__}; it must be a JSON object.")
    return found  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are texts


def wrong_dtypes(config: object, *keys: str) -> Iterator[tuple[str, str]]:
    """Key path and sentence of each of these settings of a model that names no dtype; None is one that is off."""
    for key in keys:
        value = getattr(config, key)
        if value is not None and value not in DTYPES:
            yield f"model.{key}", f"{value!r} was asked for; it is one of {', '.join(DTYPES)}."


def dtype_of(name: str, *, key: str, model: str) -> torch.dtype:
    """The torch dtype of that name. Raises RecipeError, which names `key`, for any other.

    model: who takes it, for messages.
    """
    if name not in DTYPES:
        raise RecipeError(f"{key}: {name!r} is not a dtype that {model} takes; use one of {', '.join(DTYPES)}.")
    import torch

    return getattr(torch, name)


@contextmanager
def no_progress_bars(*logs: ProgressLog) -> Generator[None]:
    """One bar a component would tear up the display of the run; each library's own setting is restored."""
    shown = [log for log in logs if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
