"""Checkpoints of a run: written beside the old ones, verified by checksum, renamed into place, kept by count."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.core.errors import CheckpointError

__all__ = ["Checkpoint", "Checkpoints"]

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """State of the run beside the backend's files."""

    def backend_folder(self, learner: str) -> Path:
        """Files of the backend of a learner; "" is the only one."""
        return self.folder / "backend" / learner


class Checkpoints:
    """The checkpoints under one folder, named `step-<number>`."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, *, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint. `write(folder)` stores the backend's files in the folder that it is given.

        Nothing that is there already is touched before the new one is complete on disk. Raises CheckpointError when it
        cannot be written (a full disk, say); the earlier ones are then as they were.
        """
        final, part = self.folder / f"step-{step:06d}", self.folder / f".part-step-{step:06d}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            (part / "backend").mkdir(parents=True)
            write(part / "backend")
            files = {str(path.relative_to(part)): _describe(path) for path in sorted(part.rglob("*")) if path.is_file()}
            manifest = {"format": FORMAT, "step": step, "state": dict(state), "files": files}
            _write_synced(part / MANIFEST, json.dumps(manifest, indent=1))
            if final.exists():
                shutil.rmtree(final)
            part.rename(final)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"{final}: the checkpoint could not be written: {error.strerror or error}. "
                f"Earlier checkpoints are intact: {self._listed()}."
            ) from error
        self._retire()
        return final

    def load(self, which: Path | None = None) -> Checkpoint:
        """The newest checkpoint, or the one at `which`, after checking every file of it.

        Raises CheckpointError when there is none, or when a file is missing, truncated or altered; the message says
        which older ones are whole.
        """
        folders = self._folders()
        if which is None:
            if not folders:
                raise CheckpointError(f"{self.folder}: no checkpoint to resume from; start the run anew.")
            which = folders[-1]
        problem = _problem(which)
        if problem:
            good = [folder for folder in folders if folder != which and not _problem(folder)]
            hint = (
                f"Resume from an older one with `--resume {good[-1]}`."
                if good
                else "No other checkpoint of this run is whole; start the run anew."
            )
            raise CheckpointError(f"{which}: {problem}. {hint}")
        manifest = json.loads((which / MANIFEST).read_text(encoding="utf-8"))
        return Checkpoint(folder=which, step=manifest["step"], state=manifest["state"])

    def any(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self._folders())

    def _folders(self) -> list[Path]:
        result = [p for p in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
        return sorted(result, key=lambda p: int(p.name[5:]))

    def _listed(self) -> str:
        return ", ".join(folder.name for folder in self._folders()) or "none yet"

    def _retire(self) -> None:
        if self._keep:
            for folder in self._folders()[: -self._keep]:
                shutil.rmtree(folder)


def _problem(folder: Path) -> str:
    """The defect of a checkpoint; empty when it is whole."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing, so this is no complete checkpoint"
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']!r} was found; this version reads format {FORMAT}"
        if not isinstance(manifest["step"], int) or not isinstance(manifest["state"], dict):
            return f"{MANIFEST} cannot be read: 'step' must be a number and 'state' an object"
        written = {str(name): (int(file["size"]), str(file["blake2b"])) for name, file in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error!r})"
    for name, (size, digest) in written.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name!r}, a file outside of the checkpoint"
        file = folder / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != size:
            return f"file {name} is truncated: {file.stat().st_size} bytes, {size} were written"
        if _digest(file) != digest:
            return f"file {name} was altered: its checksum differs from the one written"
    return ""


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "blake2b": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
