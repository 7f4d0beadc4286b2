"""DCP's `.metadata`, a pickle, read without running anything: by an allow-list of the classes that describe tensors.

DCP itself unpickles it whole, so that whoever can write to a checkpoint could run code in the process that loads it.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from unirl.core.errors import CheckpointError

__all__ = ["TensorReader", "read_metadata"]

FILE = ".metadata"
LAYOUTS = {str(layout): layout for layout in (torch.strided,)}


def _layout(name: str) -> torch.layout:
    """Replaces `torch.serialization._get_layout`: trainable weights are strided."""
    return LAYOUTS[name]


def _member(kind: object, name: str) -> object:
    """Replaces `getattr`, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    if kind is not metadata._MEM_FORMAT_ENCODING:  # pyright: ignore[reportPrivateUsage]
        raise _Foreign("builtins.getattr")
    return metadata._MEM_FORMAT_ENCODING[name]  # pyright: ignore[reportPrivateUsage]


ALLOWED: dict[tuple[str, str], Any] = {
    (item.__module__, item.__name__): item
    for item in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
        filesystem._StorageInfo,  # pyright: ignore[reportPrivateUsage]
        torch.Size,
    )
} | {
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _layout,
    # Where the checkpoint was written. Its class depends on the Python that wrote it; a pure path opens nothing.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
"""Names that a pickle of DCP's metadata may use. `BytesStorageMetadata` is left out: it is for pickled objects."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in ALLOWED:
            return ALLOWED[module_name, global_name]
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Foreign(f"{module_name}.{global_name}")


class _Foreign(Exception):
    """A name that is not on the list."""


class TensorReader(FileSystemReader):
    """DCP's reader of a folder, only for tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        result = read_metadata(Path(self.path))
        result.storage_meta = result.storage_meta or StorageMeta()
        result.storage_meta.load_id = self.load_id
        return result


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint of tensors.

    Raises CheckpointError when it is missing, cut off, or names anything else than tensors in files of this folder.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            result: object = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: {FILE} is missing, so this checkpoint was never completed.") from error
    except _Foreign as error:
        raise CheckpointError(
            f"{path}: names {error}, which the metadata of a checkpoint never does: it was altered. None of it was "
            "run. Resume from a checkpoint that you trust."
        ) from error
    except Exception as error:  # what a cut-off pickle raises is not listed anywhere
        raise CheckpointError(f"{path}: cannot be read ({error!r}); resume from an older checkpoint.") from error
    problem = _problem(result)
    if problem:
        raise CheckpointError(f"{path}: {problem}; resume from an older checkpoint.")
    return cast(Metadata, result)


def _problem(found: object) -> str:
    """Problem with the metadata of a checkpoint of tensors; empty for none."""
    if not isinstance(found, Metadata):
        return f"holds a {type(found).__name__}, not the metadata of a checkpoint"
    tables: tuple[object, ...] = (found.state_dict_metadata, found.storage_data)
    if not all(isinstance(table, dict) for table in tables):
        return "has no tables of tensors and files"
    for name, item in found.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            return f"{name!r} is a {type(item).__name__}, not a tensor"
    for place in cast(dict[object, Any], found.storage_data).values():
        is_file = isinstance(place, filesystem._StorageInfo)  # pyright: ignore[reportPrivateUsage]
        if not is_file or Path(place.relative_path).name != place.relative_path:
            return f"names a file outside of the folder ({place!r})"
    return ""
