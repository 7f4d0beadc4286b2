"""Checkpoints on disk: downloaded from the hub, or damaged."""

from __future__ import annotations

import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

__all__ = ["as_hub_id", "cut"]


def as_hub_id(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a checkpoint into the hub client's cache, as links to blobs, and disable the network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--acme--tiny"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "blobs").mkdir()
    for file in [path for path in (repository / "snapshots" / commit).rglob("*") if path.is_file()]:
        blob = repository / "blobs" / sha256(str(file).encode()).hexdigest()
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "acme/tiny"


def cut(folder: Path) -> None:
    """Truncate the weights in a folder to their first half, as an interrupted download does."""
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
