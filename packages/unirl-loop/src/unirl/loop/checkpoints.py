"""Checkpoints of a run: written beside the old ones, verified by checksum, renamed into place and out of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from unirl.core.disk import free_space
from unirl.core.errors import CheckpointError, UniRLError

__all__ = ["Checkpoint", "Checkpoints"]

MANIFEST = "manifest.json"
FORMAT = 2
DIGEST = "blake2b"
PART, OLD, REPLACED = ".part-", ".old-", ".replaced-"
"""Beginnings of the names of folders that are being written, that are being removed, and whose place a new one takes.
None of them is a checkpoint to a reader."""


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
    """The checkpoints under one folder, named `step-<number>`.

    One process writes, the one that has locked the run folder; others may read meanwhile. A checkpoint comes and goes
    as a whole, by renaming its folder.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, *, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint. `write(folder)` stores the backend's files in the folder that it is given.

        Nothing that is there already is touched before the new one is complete on disk. Whatever is raised, the earlier
        ones are as they were, and nothing of the new one is left. Raises CheckpointError when it cannot be written (a
        full disk, say), whatever the writer raised; an error of UniRL's own keeps its type and gets a note.
        """
        self.clear()
        final = self.at(step)
        part, replaced = (self.folder / f"{prefix}{final.name}" for prefix in (PART, REPLACED))
        try:
            # Not its parents: a run folder that was deleted does not come back with a checkpoint alone.
            self.folder.mkdir(exist_ok=True)
            (part / "backend").mkdir(parents=True)
            write(part / "backend")
            files = {str(path.relative_to(part)): _describe(path) for path in sorted(part.rglob("*")) if path.is_file()}
            manifest = {"format": FORMAT, "step": step, "state": dict(state), "files": files}
            _write_synced(part / MANIFEST, json.dumps({DIGEST: _manifest_digest(manifest), **manifest}, indent=1))
            if final.exists():
                final.rename(replaced)
            part.rename(final)
            _sync_folder(self.folder)
        except BaseException as error:
            # Before there is room again.
            free = free_space(self.folder)
            self.clear()
            intact = f"Earlier checkpoints are intact: {', '.join(map(_name, self.steps())) or 'none yet'}."
            if part.exists():
                intact += f" {part} could not be removed; delete it."
            if isinstance(error, UniRLError) or not isinstance(error, Exception):
                error.add_note(f"{final}: the checkpoint was not written. {intact}")
                raise
            reason = (isinstance(error, OSError) and error.strerror) or str(error).strip() or repr(error)
            reason = reason.splitlines()[0].rstrip(".")
            raise CheckpointError(
                f"{final}: the checkpoint could not be written: {reason}. {intact} When it failed, {free} of "
                "the disk were free; make room if that was too little."
            ) from error
        self._retire(step)
        return final

    def load(self, which: Path | None = None) -> Checkpoint:
        """The newest checkpoint, or the one at `which`, after checking every file of it.

        Raises CheckpointError when there is none, or when a file is missing, truncated or altered; the message says
        which older ones are whole. The newest that is removed by a run while it is read gives way to the next.
        """
        while True:
            folders = [self.at(step) for step in self.steps()]
            if which is None and not folders:
                raise CheckpointError(f"{self.folder}: no checkpoint to resume from; start the run anew.")
            folder = folders[-1] if which is None else which
            result = _read(folder)
            if isinstance(result, Checkpoint):
                return result
            if which is not None or folder.exists():
                break
        good = [other for other in folders if other != folder and isinstance(_read(other), Checkpoint)]
        hint = (
            f"Resume from an older one with `--resume {good[-1]}`."
            if good
            else "No other checkpoint of this run is whole; start the run anew."
        )
        raise CheckpointError(f"{folder}: {result}. {hint}")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        # By their names alone: a folder that is gone when it is looked at would hide that another has come.
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted(
            int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name) and name == _name(int(name[5:]))
        )

    def at(self, step: int) -> Path:
        """The folder of a step's checkpoint, whether it is there or not."""
        return self.folder / _name(step)

    def clear(self) -> None:
        """Remove the rests of writes and removals that were cut off. Only for the process that writes.

        A checkpoint that was to be replaced, and was not, is put back.
        """
        for replaced in self.folder.glob(f"{REPLACED}step-*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            if not final.exists():
                replaced.rename(final)
        for prefix in (PART, OLD, REPLACED):
            for rest in self.folder.glob(f"{prefix}step-*"):
                shutil.rmtree(rest, ignore_errors=True)

    def _retire(self, step: int) -> None:
        """Remove all but the last `keep` up to this step, and the one that it has replaced.

        Later ones, of a run that was resumed from an older checkpoint, stay until the run passes them.
        """
        done = [number for number in self.steps() if number <= step]
        try:
            for number in done[: -self._keep] if self._keep else ():
                self.at(number).rename(self.folder / f"{OLD}{_name(number)}")
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: an old checkpoint cannot be removed: {error}. {_name(step)} is written; run.keep=0 "
                "keeps all."
            ) from error
        self.clear()


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _read(folder: Path) -> Checkpoint | str:
    """The checkpoint in a folder if every file of it is whole; else its defect."""
    path = folder / MANIFEST
    if not folder.is_dir():
        return "there is no such checkpoint; the run keeps the last `run.keep`"
    if not path.is_file():
        return f"{MANIFEST} is missing, so this is no complete checkpoint"
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return (
                f"format {manifest['format']!r} was found; this version reads format {FORMAT}, so resume it with the "
                "version of UniRL that wrote it"
            )
        if manifest.pop(DIGEST) != _manifest_digest(manifest):
            return f"{MANIFEST} was altered: its checksum differs from the one written"
        step, state = manifest["step"], manifest["state"]
        if not isinstance(step, int) or not isinstance(state, dict):
            return f"{MANIFEST} cannot be read: 'step' must be a number and 'state' an object"
        written = {str(name): (int(file["size"]), str(file["blake2b"])) for name, file in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error!r})"
    if folder.name != _name(step):
        return f"{MANIFEST} is of {_name(step)}, so the folder was renamed or copied; give it that name"
    for name, (size, digest) in written.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name!r}, a file outside of the checkpoint"
        file = folder / name
        try:
            if not file.is_file():
                return f"file {name} is missing"
            if file.stat().st_size != size:
                return f"file {name} is truncated: {file.stat().st_size} bytes, {size} were written"
            if _digest(file) != digest:
                return f"file {name} was altered: its checksum differs from the one written"
        except OSError as error:
            return f"file {name} cannot be read ({error})"
    return Checkpoint(folder=folder, step=step, state=cast("dict[str, Any]", state))


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """BLAKE2b of a manifest without its digest, as JSON in the order of its keys."""
    plain = json.loads(json.dumps(manifest))
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


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
