"""The folder of a run: its files, a name that no other run can take, and a lock held by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unirl.core.disk import is_at, replace_text, writing
from unirl.core.errors import CheckpointError, DiskFull, RunFolderError
from unirl.numerics.cpu import describe_cpu

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan

__all__ = [
    "CHECKPOINTS",
    "EVENTS_FILE",
    "LOCK_FILE",
    "RECIPE_FILE",
    "RunFolder",
    "held_folder",
    "new_folder",
    "run_folder",
    "write_recipe",
    "write_traceback",
]

LOCK_FILE = "run.lock"
RECIPE_FILE = "recipe.json"
EVENTS_FILE = "events.jsonl"
TRACEBACK_FILE = "traceback.txt"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run folder that this process has locked."""

    path: Path
    stale: str = ""
    """A sentence on the stale lock that was taken over; empty when there was none."""


@contextmanager
def run_folder(plan: Plan, resume: Path | None, *, continues: bool = False) -> Generator[RunFolder]:
    """The folder of a run, locked against other processes: `run.dir`, a new one, or the one to resume.

    continues: `run.dir` may hold a run already.

    Raises CheckpointError when there is no run to resume in it, or another run where a new one is to start.
    """
    if resume is not None:
        folder = resume.parent.parent if resume.parent.name == CHECKPOINTS else resume
        if not folder.is_dir():
            raise CheckpointError(f"{resume}: no such run folder; pass `--resume` the folder that the run printed.")
    elif plan.run.dir:
        folder = Path(plan.run.dir).expanduser()
    else:
        name = (plan.run.name or plan.recipe).replace("/", "-")
        folder = new_folder(Path("runs"), f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    with held_folder(folder, is_new=resume is None and not plan.run.dir) as held:
        if resume is None and not continues and (folder / EVENTS_FILE).exists():
            raise CheckpointError(
                f"run.dir: {folder} already contains a run. Resume it with `--resume {folder}`, or use another folder."
            )
        yield held


def new_folder(parent: Path, name: str) -> Path:
    """Create a folder in `parent`, race-free: `name`, or `name-2` and so on where that exists.

    Raises RunFolderError when it cannot be created.
    """
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with _making(folder):
            parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
        return folder
    raise AssertionError("count() has no end")


@contextmanager
def held_folder(folder: Path, *, is_new: bool = False) -> Generator[RunFolder]:
    """Lock a folder while a run writes to it, creating it if it does not exist.

    is_new: created for this run by `new_folder`.  A folder that was created for this run and stays empty is removed.

    The kernel drops the lock of a process that ends, however it ends, so a lock file without a lock on it is stale.
    Raises RunFolderError when another process holds the lock, when a process on another host may hold it, and when the
    folder cannot be written to.
    """
    made = [folder, folder.parent] if is_new else [path for path in (folder, *folder.parents) if not path.exists()]
    with _making(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        handle, stale = _take(folder / LOCK_FILE)
    except BaseException:
        _remove_empty(made)
        raise
    try:
        yield RunFolder(path=folder, stale=stale)
    finally:
        # Removed while still locked: a process that opens it later gets a new file, and notices that it does. The lock
        # of a run that has taken the place of a deleted folder is not ours.
        if is_at(handle, folder / LOCK_FILE):
            (folder / LOCK_FILE).unlink()
        os.close(handle)
        _remove_empty(made)


def write_recipe(folder: Path, plan: Plan, overrides: Sequence[str], *, hashes: Mapping[str, str]) -> None:
    """Write the resolved plan, where each value came from, the folder that relative paths begin in, and the versions
    that run it.

    hashes: config key -> hash of the file that it names.
    """
    recipe = {
        "recipe": plan.recipe,
        "overrides": list(overrides),
        "started_in": str(Path.cwd()),
        "hash": plan.hash,
        "cpu": str(describe_cpu(with_torch=True)),
        "dists": {choice.dist: choice.version for choice in plan.choices},
        "files": dict(hashes),
        "resolved": plan.resolved,
        "origins": {key: [origin.source, origin.detail] for key, origin in plan.origins.items()},
    }
    replace_text(folder / RECIPE_FILE, json.dumps(recipe, indent=1))


def write_traceback(folder: Path, error: BaseException) -> str:
    """Write a traceback to a file; returns a sentence for the error's notes."""
    file = folder / TRACEBACK_FILE
    try:
        replace_text(file, "".join(traceback.format_exception(error)))
    except (OSError, DiskFull) as failure:
        return f"The traceback could not be written: {failure}"
    return f"The traceback is in {file}."


def _take(file: Path) -> tuple[int, str]:
    """The open lock file, and a sentence on the stale lock that was taken over."""
    while True:
        with _making(file):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_ours = _locked(handle)
            if is_ours and not is_at(handle, file):
                os.close(handle)
                continue
            owner = _owner(handle)
            if not is_ours:
                raise RunFolderError(
                    f"{file.parent}: {_named(owner)} is writing to this run folder. Wait for it to finish, stop it, or "
                    "give the new run another folder with `run.dir=...`."
                )
            if owner and owner.get("host") != socket.gethostname():
                raise RunFolderError(
                    f"{file.parent}: {_named(owner)} has locked this run folder, and host {socket.gethostname()!r} "
                    f"cannot tell whether it is still running. If it has ended, delete {file} and try again."
                )
            with writing(file):
                _write_owner(handle)
        except BaseException:
            os.close(handle)
            raise
        return handle, f"run folder {file.parent}: took over the lock of {_named(owner)}, which is gone." * bool(owner)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"run.dir: its file system does not support locks ({error.strerror}), so two runs could write to the same "
            "folder. Put the run folder on another file system."
        ) from error
    return True


def _owner(handle: int) -> dict[str, Any]:
    """The owner recorded in the lock file; empty for a new file, or one that its owner is about to write."""
    try:
        result: object = json.loads(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        result = {"pid": "unknown"}
    return cast(dict[str, Any], result) if isinstance(result, dict) else {"pid": "unknown"}


def _write_owner(handle: int) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(owner).encode(), 0)


def _named(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    pid, host, started = (owner.get(key, "unknown") for key in ("pid", "host", "started"))
    return f"process {pid} on host {host!r}, started {started},"


@contextmanager
def _making(path: Path) -> Generator[None]:
    """Turns an OSError from creating a folder or file of a run into a RunFolderError."""
    try:
        with writing(path):
            yield
    except OSError as error:
        raise RunFolderError(
            f"run.dir: {path} cannot be created: {error.strerror or error}. Use a folder that you may write to."
        ) from error


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the deepest first, up to the first that has something in it."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
