"""A run that is read while it is written: only the new lines of its events, in pieces, with bounded memory."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from unirl.core.disk import is_inside
from unirl.core.observe.events import read_event

from ..history import EVENTS, Evaluation, RunHistory, SavedCheckpoint, StepRow, add_event
from ..media import INDEX, MEDIA, SampleBatch, read_media
from .curve import Curve

__all__ = ["PIECE", "Group", "LiveRun", "PhaseTime"]

PIECE = 4 * 2**20
"""Bytes that are read at once; no line is longer."""
LARGEST_INDEX = 64 * 2**20
"""Bytes of the index of samples."""
LARGEST = 1e100
"""Values that curves show: larger ones, on either side of 0, are left out as those that are not finite are."""
MOST_CURVES = 2000
MOST_FINDINGS = 1000
"""The last ones are kept."""
SILENT_S = 600
"""A run without an event for so long, and for ten of its steps, is not called running."""

Group = Literal["train", "held-out", "seconds"]
"""Numbers of steps, of evaluations, and of the phases of both."""


@dataclass(kw_only=True)
class PhaseTime:
    """Seconds of a phase. Steps that a resumed run repeated count, because they took their time."""

    times: int = 0
    total: float = 0.0
    longest: float = 0.0


class LiveRun:
    """A run folder, read up to some byte of its events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._media: tuple[tuple[int, int], list[SampleBatch]] | None = None
        self._file_id: tuple[int, int] | None = None
        self._restart()
        self.problem = ""
        """Why the run cannot be read, or not beyond some line; empty otherwise."""

    def _restart(self) -> None:
        self.history = RunHistory(folder=self.folder)
        self.curves: dict[tuple[Group, str], Curve] = {}
        self.phases: dict[str, PhaseTime] = {}
        self.num_findings = 0
        self.offset, self.size = 0, 0
        """Bytes of the events that were read, and that there are."""
        self._line = 0
        self._is_broken = False

    @property
    def version(self) -> str:
        """Another text whenever the run has changed."""
        return f"{self._file_id}-{self.offset}-{self.problem}"

    @property
    def state(self) -> str:
        """`done`, `stopped`, `failed`, `running`, or `unfinished`: no end is recorded, and nothing happens any more;
        `unreadable` without a start."""
        if not self.history.sessions:
            return "unreadable"
        session = self.history.sessions[-1]
        if session.status is not None:
            return session.status
        of_step = (session.last_seen - session.began) / max(1, self.num_steps - session.first_step)
        return "running" if time.time() - session.last_seen < max(SILENT_S, 10 * of_step) else "unfinished"

    @property
    def num_steps(self) -> int:
        """Steps completed."""
        last = [curve.steps[-1] for (group, _), curve in self.curves.items() if group == "train" and curve.steps]
        return max([self.history.sessions[-1].first_step if self.history.sessions else 0, *last])

    def read(self) -> bool:
        """Read the next piece of the events. True when there is more.

        Sets `problem` for a file that is gone, that leads out of the folder, or has a line that is not an event.
        """
        path = self.folder / EVENTS
        try:
            if not is_inside(path, self.folder):
                raise ValueError(f"{path}: it leads out of the run folder, and is not read.")
            # Before it is opened: a pipe would wait for its writer.
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{path}: it is not a file.")
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                file_id = (facts.st_dev, facts.st_ino)
                if file_id != self._file_id or facts.st_size < self.offset:
                    self._restart()
                    self._file_id = file_id
                elif self._is_broken:
                    return False
                self.size = facts.st_size
                file.seek(self.offset)
                piece = file.read(PIECE)
        except FileNotFoundError:
            self.problem = f"{path}: it is gone. The page shows what was read before."
            return False
        except (OSError, ValueError) as error:
            self.problem = str(error)
            return False
        try:
            self._add(path, piece)
            is_empty = not self.history.sessions and len(piece) < PIECE
            self.problem = f"{path}: it records no start of a run yet." if is_empty else ""
        except ValueError as error:
            self._is_broken, self.problem = True, f"{error}{self._later()}"
            return False
        return len(piece) == PIECE

    def samples(self) -> list[SampleBatch]:
        """The saved samples, by step. Raises ValueError and OSError for a damaged index and for files elsewhere."""
        index = self.folder / MEDIA / INDEX
        if not is_inside(index, self.folder):
            raise ValueError(f"{index}: it leads out of the run folder, and is not read.")
        if not index.exists():
            return []
        facts = index.stat()
        if facts.st_size > LARGEST_INDEX:
            size, most = facts.st_size / 2**20, LARGEST_INDEX // 2**20
            raise ValueError(f"{index}: got {size:.0f} MiB, expected at most {most} MiB; its samples are not shown.")
        seen = (facts.st_mtime_ns, facts.st_size)
        if self._media is None or self._media[0] != seen:
            self._media = (seen, read_media(self.folder))
        return self._media[1]

    def add(self, row: StepRow | Evaluation | SavedCheckpoint) -> None:
        if isinstance(row, SavedCheckpoint):
            return
        group: Group = "train" if isinstance(row, StepRow) else "held-out"
        for name, value in row.metrics.items():
            self._point(group, name, row.step, value)
        for phase, seconds in row.phases.items():
            self._point("seconds", phase, row.step, seconds)
            of_phase = self.phases.setdefault(phase, PhaseTime())
            of_phase.times += 1
            of_phase.total += seconds
            of_phase.longest = max(of_phase.longest, seconds)

    def rewind(self, step: int) -> None:
        for curve in self.curves.values():
            curve.rewind(step)

    def _add(self, path: Path, piece: bytes) -> None:
        end = piece.rfind(b"\n") + 1
        if end == 0 and len(piece) == PIECE:
            raise ValueError(
                f"{path}:{self._line + 1}: a line of more than {PIECE // 2**20} MiB, which is not an event."
            )
        for line in piece[:end].split(b"\n")[:-1]:
            self._line += 1
            where = f"{path}:{self._line}"
            if line.strip():
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where}: not UTF-8 text (byte {error.start}).") from error
                event = read_event(text, where=where)
                self.num_findings += event.kind == "finding"
                add_event(self.history, event, self)
                del self.history.findings[:-MOST_FINDINGS]
            self.offset += len(line) + 1

    def _point(self, group: Group, name: str, step: int, value: float) -> None:
        # Also false for NaN.
        if not abs(value) <= LARGEST:
            return
        curve = self.curves.get((group, name))
        if curve is None:
            if len(self.curves) == MOST_CURVES:
                raise ValueError(f"{self.folder / EVENTS}:{self._line}: metrics: expected at most {MOST_CURVES} names.")
            curve = self.curves[group, name] = Curve()
        curve.add(step, value)

    def _later(self) -> str:
        """A hint, for a run that was made by a later version than this one."""
        here = version("unirl-tracker-report")
        made_by = self.history.versions.get("unirl-loop", here)
        if _numbers(made_by) <= _numbers(here):
            return ""
        return f" The run was made by UniRL {made_by}, and this is {here}: install unirl-tracker-report {made_by}."


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal() and len(part) < 10)
