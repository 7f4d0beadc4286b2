"""Where the base checkpoint of a run is on this machine."""

from __future__ import annotations

from pathlib import Path

__all__ = ["local_checkpoint"]


def local_checkpoint(path: str, *, revision: str | None, beside: Path = Path()) -> Path | None:
    """The folder of a checkpoint, or that of a hub id in the cache; None if it is not on this machine.

    beside: folder in which a relative path begins.
    """
    folder = beside / Path(path).expanduser()
    if not path or folder.is_dir():
        return folder if path else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
