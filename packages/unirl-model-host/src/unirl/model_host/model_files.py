"""Finding and checking the files of a checkpoint, with one clear error for each way they can be wrong.

Every error is for the key `model.path` unless another is given. The libraries that fetch and load belong to the plugin
of the model or reward, which passes in the functions needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from unirl.core.disk import is_inside
from unirl.core.errors import RecipeError

if TYPE_CHECKING:
    import torch


__all__ = [
    "DTYPES",
    "ProgressLog",
    "check_contained",
    "check_filled",
    "check_parts",
    "check_vocabulary",
    "checkpoint_version",
    "contained_file",
    "dtype_of",
    "find_checkpoint",
    "loading_pipeline",
    "no_progress_bars",
    "pipeline_index",
    "read_json",
    "scheduler_config",
    "shard_names",
]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
DTYPES = ("float32", "bfloat16", "float16")
"""Names of dtypes that a recipe may give."""


class ProgressLog(Protocol):
    """The logging module of diffusers or of transformers, `<library>.utils.logging`."""

    def is_progress_bar_enabled(self) -> bool: ...
    def disable_progress_bar(self) -> None: ...
    def enable_progress_bar(self) -> None: ...


def find_checkpoint(
    path: str, *, layout: str, example: str, fetch: Callable[[str], str | PathLike[str]], key: str = "model.path"
) -> Path:
    """The folder of a checkpoint; a hub id is fetched, or taken from the local cache when there is no network.

    layout: `diffusers` or `transformers`.  example: an id, for messages.  fetch: returns the folder of an id; raises
    OSError or ValueError, as the hub's client does, when it cannot.  key: of the setting, for messages.
    Everything is to be read from the folder, so that a hub id and a local path cannot differ. Raises RecipeError for
    one whose files are elsewhere, see `check_contained`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        check_contained(folder, key=key)
        return folder
    what = f"{key}: there is no folder {path!r}"
    if not _HUB_ID.fullmatch(path):
        raise RecipeError(
            f"{what}, and it is not a hub id either. Give a folder in the {layout} layout, or an id such as "
            f"{example!r}."
        )
    try:
        folder = Path(fetch(path))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{what}, and it cannot be fetched from the hub: {error} Check the name, log in if the model is gated, or "
            f"give a folder in the {layout} layout."
        ) from error
    check_contained(folder, key=key)
    return folder


def check_contained(folder: Path, *, key: str = "model.path") -> None:
    """Raise RecipeError for a file of a checkpoint that is not in its folder: a link that leads out of it, or a name in
    `model_index.json` or in an index of shards.

    Libraries follow both, and an export would publish what they lead to. Links of the hub's cache lead to the blobs of
    their own repository, which is allowed.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            contained_file(folder, path.relative_to(folder), key=key)
    for index in sorted(folder.rglob("*.index*.json")):
        for name in shard_names(index, key=key):
            contained_file(index.parent, name, key=key, named_by=index)
    index = folder / "model_index.json"
    for name in read_json(index, key=key) if index.is_file() else ():
        contained_file(folder, name, key=key, named_by=index)


def contained_file(
    folder: Path, name: str | PurePath, *, key: str = "model.path", named_by: Path | None = None
) -> Path:
    """Path of a file of a checkpoint. Raises RecipeError if it is not in its folder or the blobs of its hub repository.

    named_by: the file of the checkpoint that has the name.
    """
    parts, path = PurePath(name), folder / name
    says = f"{key}: {str(named_by)!r} names {str(name)!r}, " if named_by else f"{key}: {str(path)!r} is a link "
    if parts.is_absolute() or ".." in parts.parts:
        raise RecipeError(f"{says}expected a name in its own folder. Fetch the checkpoint again.")
    if not any(is_inside(path, place) for place in (folder, *_blobs(folder))):
        says += "which is a link " if named_by else ""
        raise RecipeError(
            f"{says}out of the checkpoint's folder. Replace the link by a copy of the file, or remove it."
        )
    return path


def shard_names(index: Path, *, key: str = "model.path") -> list[str]:
    """Names of the weight files in an index of shards, `*.index.json`, sorted."""
    places: Any = read_json(index, key=key).get("weight_map", {})
    names: list[Any] = list(places.values()) if isinstance(places, dict) else [None]  # pyright: ignore[reportUnknownArgumentType]
    if not all(isinstance(name, str) for name in names):
        raise RecipeError(f"{key}: {str(index)!r} has no map to file names under 'weight_map'. Fetch it again.")
    return sorted(set(names))


def _blobs(folder: Path) -> list[Path]:
    """Where the hub's cache keeps the files of the snapshot that a folder is, or is in."""
    real = folder.resolve()
    repositories = [place.parent.parent for place in (real, *real.parents) if place.parent.name == "snapshots"]
    blobs = [place / "blobs" for place in repositories if place.name.startswith("models--")]
    return [place for place in blobs if not place.is_symlink()]


def checkpoint_version(path: str) -> str:
    """A digest of a checkpoint in a local folder, which changes when a file or a tensor does; empty for a hub id.

    Read in full: names, sizes, .json files and the headers of .safetensors files. Of each tensor 4 KiB from its middle:
    training changes nearly every element, and a checkpoint may have hundreds of GB.
    """
    folder = Path(path).expanduser()
    digest = hashlib.blake2b(digest_size=16)
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".json", ".safetensors") and file.is_file()]
    for file in files:
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        try:
            with file.open("rb") as opened:
                digest.update(opened.read() if file.suffix == ".json" else _sample(opened, file.stat().st_size))
        except OSError as error:
            raise RecipeError(f"model.path: {str(file)!r} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest() if files else ""


def _sample(file: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file of this size, and a piece of each tensor; the header alone if it is damaged,
    which whoever loads the file reports."""
    # The format: 8 bytes with the length of a JSON header, the header, then the data that its offsets count in.
    length = min(int.from_bytes(file.read(8), "little"), size)
    result = [header := file.read(length)]
    try:
        tensors: dict[str, Any] = json.loads(header)
        spans = [tensors[name]["data_offsets"] for name in sorted(tensors.keys() - {"__metadata__"})]
        for begin, end in spans:
            middle = (begin + end) // 2
            file.seek(8 + length + middle)
            result.append(file.read(max(0, min(4096, end - middle))))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    return b"".join(result)


def pipeline_index(
    folder: Path, *, pipeline: str, model: str, hint: str = "", siblings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The `model_index.json` of a checkpoint in the diffusers layout, which must be one of the class `pipeline`.

    hint: what to do about a folder without one, as a clause.  siblings: class name of another pipeline -> the model
    that loads its checkpoints.
    """
    where = f"model.path: {str(folder)!r}"
    if not (folder / "model_index.json").is_file():
        raise RecipeError(
            f"{where} has no model_index.json, so it is not in the diffusers layout. Give the folder that holds "
            f"transformer/, vae/, scheduler/, the tokenizers and the text encoders{f'; {hint}' if hint else ''}."
        )
    index = read_json(folder / "model_index.json")
    result = index.get("_class_name")
    if result != pipeline:
        known = (siblings or {}).get(str(result))
        choice = f"Choose model={known}" if known else "Choose the model plugin of that pipeline"
        raise RecipeError(
            f"{where} is a checkpoint of {result!r}; {model} loads {pipeline!r}. {choice}, or another checkpoint."
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


@contextmanager
def loading_pipeline(
    folder: Path, *, title: str, logs: Sequence[ProgressLog], errors: tuple[type[Exception], ...]
) -> Generator[None]:
    """Context for diffusers' `from_pretrained`: no progress bars, and RecipeError for a component that does not load.

    title: of the model, as its authors write it.  errors: exceptions that a library raises for a damaged file, besides
    OSError and ValueError.
    """
    try:
        with no_progress_bars(*logs):
            yield
    except (OSError, ValueError, *errors) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} looks like a {title} checkpoint, but a component does not load: {error} "
            "Fetch the checkpoint again, or check model.variant."
        ) from error


def check_filled(folder: Path, components: Mapping[str, object], *, given: Mapping[str, object]) -> None:
    """Raise RecipeError for a weight of a loaded pipeline that its checkpoint has no values for.

    components: those of the pipeline by name. diffusers leaves such weights on the meta device, without values.
    given: components that were not loaded from the checkpoint; not checked.
    """
    import torch

    for name, part in components.items():
        if isinstance(part, torch.nn.Module) and name not in given:
            empty = [key for key, weight in part.state_dict().items() if weight.is_meta]
            if empty:
                more = f" and {len(empty) - 1} more" if empty[1:] else ""
                raise RecipeError(
                    f"model.path: the weights in {str(folder / name)!r} lack {empty[0]!r}{more}. Fetch the whole "
                    "checkpoint."
                )


def check_vocabulary(folder: Path, names: Sequence[str], *, part: str = "", key: str = "model.path") -> None:
    """Raise RecipeError for a tokenizer without any file of `names`, of which one is enough.

    part: subfolder of the checkpoint that holds the tokenizer, if any.

    transformers loads an empty tokenizer from such a folder, and every prompt would look the same.
    """
    if not any((folder / part / name).is_file() for name in names):
        where = f" in {part}/" if part else ""
        raise RecipeError(
            f"{key}: {str(folder)!r} has no vocabulary{where} ({' or '.join(names)}). Fetch the whole checkpoint."
        )


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The `scheduler_config.json` of a checkpoint in the diffusers layout."""
    return read_json(folder / "scheduler" / "scheduler_config.json")


def read_json(path: Path, *, key: str = "model.path") -> dict[str, Any]:
    """A JSON object. Raises RecipeError when the file is absent, or anything else."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{key}: {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(result, dict):
        raise RecipeError(f"{key}: {str(path)!r} is a {type(result).__name__}, expected a JSON object.")
    return result  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are texts


def dtype_of(name: str, *, key: str, model: str) -> torch.dtype:
    """The torch dtype of that name. Raises RecipeError, with `key`, for any other name.

    model: its name, for messages.
    """
    if name not in DTYPES:
        raise RecipeError(f"{key}: {name!r} is not a dtype that {model} takes; use one of {', '.join(DTYPES)}.")
    import torch

    return getattr(torch, name)


@contextmanager
def no_progress_bars(*logs: ProgressLog) -> Generator[None]:
    """A progress bar per component would garble the run's display; each library's setting is restored afterwards."""
    shown = [log for log in logs if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
