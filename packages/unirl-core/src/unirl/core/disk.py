"""Files that are written whole or not at all, full disks, and paths that lead out of their folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import DiskFull

__all__ = ["NO_SPACE", "disk_full", "free_space", "is_at", "is_inside", "replace_bytes", "replace_text", "writing"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that did not fit: the disk, the quota, or the limit of a file's size."""


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Around writes to a file. Raises DiskFull for one that does not fit; every other error goes through."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full(path, error) from error
        raise


def disk_full(path: Path, error: OSError) -> DiskFull:
    """The error of a write that did not fit."""
    return DiskFull(
        f"{path}: could not be written: {error.strerror}. {free_space(path)} are free in {_folder(path)}. Free some "
        "space, or raise the quota."
    )


def free_space(path: Path) -> str:
    """The free space of the disk that a path is on, or would be, such as `0.5 MiB of 1024 MiB`."""
    usage = shutil.disk_usage(_folder(path))
    return f"{usage.free / 2**20:.1f} MiB of {usage.total / 2**20:.0f} MiB"


def _folder(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path leads to something in a folder, or to itself, once all links are followed."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        # Links in a circle, or a NUL.
        return False


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of a text in UTF-8."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file as a whole: whatever fails, the one that is there stays as it was. Raises DiskFull, OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path), part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
