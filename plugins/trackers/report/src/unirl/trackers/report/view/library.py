"""The runs of some folders, found again at every look, and read a piece at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..history import EVENTS
from ..media import RunFolderError
from .live_run import LiveRun

__all__ = ["MOST_RUNS", "Library"]

DEEPEST = 6
"""Levels of folders in which runs are looked for."""
MOST_RUNS = 2000
FIRST_PIECE = 2**14
"""Bytes that are read of every run before more is read of any."""
MOST_FOLDERS = 50_000
"""Folders that are looked into."""


class Library:
    """Runs by their names: paths within the folder that was given. Hold `lock` while using one."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises RunFolderError for a folder that is not there, or has no runs."""
        self.lock = threading.Lock()
        self.runs: dict[str, LiveRun] = {}
        self._reader: threading.Thread | None = None
        self._folders = [folder.absolute() for folder in folders]
        for folder in self._folders:
            if not folder.is_dir():
                raise RunFolderError(f"{folder}: it is not a folder; give run folders, or a folder of runs.")
            if next(_run_folders(folder), None) is None:
                raise RunFolderError(
                    f"{folder}: it has no runs: no folder in it, down to level {DEEPEST}, has an {EVENTS}. Links to "
                    "folders are not followed; give what they lead to."
                )
        self.look()

    def look(self) -> None:
        """Find runs that are new. Those that are gone stay, with their problem."""
        known = {run.folder for run in self.runs.values()}
        for folder in self._folders:
            for found in _run_folders(folder):
                if found not in known and len(self.runs) < MOST_RUNS:
                    known.add(found)
                    self.runs[self._name(folder, found)] = LiveRun(found)

    def read(self, *, seconds: float) -> bool:
        """Read new events of all runs, in turn, for about so many seconds. True when there is more."""
        end = time.monotonic() + seconds
        # First the beginning of all, which says what they are.
        rest = [run for run in self.runs.values() if run.offset == 0 and run.read(most=FIRST_PIECE)]
        rest += [run for run in self.runs.values() if run.offset > 0 and run not in rest]
        while rest:
            waiting, rest = rest, []
            for run in waiting:
                if time.monotonic() > end:
                    return True
                if run.read():
                    rest.append(run)
        return False

    def read_on(self) -> None:
        """Read in a thread of its own until nothing is left. Call it with the lock held; it returns at once."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        is_more = True
        while is_more:
            with self.lock:
                is_more = self.read(seconds=0.2)
                if not is_more:
                    self._reader = None
            # Lets answers in between.
            time.sleep(0.01)

    def _name(self, folder: Path, found: Path) -> str:
        name = found.relative_to(folder).as_posix() if found != folder else folder.name or "run"
        if len(self._folders) > 1 and found != folder:
            name = f"{folder.name}/{name}"
        number = 2
        while (result := name if number == 2 else f"{name} ({number - 1})") in self.runs:
            number += 1
        return result


def _run_folders(folder: Path) -> Iterator[Path]:
    """Run folders in a folder, or itself, by name. Links are not followed."""
    level = [folder]
    looked = 0
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for one in level:
            looked += 1
            if looked > MOST_FOLDERS:
                return
            if os.path.lexists(one / EVENTS):
                yield one
                continue
            try:
                with os.scandir(one) as entries:
                    below += sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
            except OSError:
                # Gone, or not ours to read: a run in it will be shown once it can be.
                continue
        level = below
