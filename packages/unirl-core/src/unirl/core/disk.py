"""Full disks: one error that says which file did not fit, how much space is free, and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import DiskFull

__all__ = ["NO_SPACE", "disk_full", "replace_text", "writing"]

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
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    usage = shutil.disk_usage(folder)
    return DiskFull(
        f"{path}: could not be written: {error.strerror}. {usage.free / 2**20:.1f} MiB of "
        f"{usage.total / 2**20:.0f} MiB are free in {folder}. Free some space, or raise the quota."
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: whatever fails, the one that is there stays as it was. Raises DiskFull, OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path), part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
