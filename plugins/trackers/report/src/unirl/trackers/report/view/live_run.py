"""A run that is read while it is written: only the new lines of its events, in pieces, with bounded memory."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class _Batch:
    """Rows of the same names, on their way to the curves: a column at a time is faster than a number at a time."""

    names: tuple[str, ...]
    steps: list[int] = field(default_factory=list[int])
    rows: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])


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
        self._batches: dict[Group, _Batch] = {}
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

    def read(self, *, most: int = PIECE) -> bool:
        """Read the next piece of the events, of at most so many bytes. True when there is more.

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
                piece = file.read(most)
        except FileNotFoundError:
            self.problem = f"{path}: it is gone. The page shows what was read before."
            return False
        except (OSError, ValueError) as error:
            self.problem = str(error)
            return False
        try:
            try:
                self._add(path, piece)
            finally:
                self._flush()
            is_empty = not self.history.sessions and len(piece) < most
            self.problem = f"{path}: it records no start of a run yet." if is_empty else ""
        except ValueError as error:
            self._is_broken, self.problem = True, f"{error}{self._later()}"
            return False
        return len(piece) == most

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
        self._note("train" if isinstance(row, StepRow) else "held-out", row.step, row.metrics)
        self._note("seconds", row.step, row.phases)

    def rewind(self, step: int) -> None:
        self._flush()
        for curve in self.curves.values():
            curve.rewind(step)

    def _note(self, group: Group, step: int, numbers: Mapping[str, float]) -> None:
        names, batch = tuple(numbers), self._batches.get(group)
        if batch is None or batch.names != names or step <= batch.steps[-1]:
            self._flush(group)
            batch = self._batches[group] = _Batch(names=names)
        batch.steps.append(step)
        batch.rows.append(tuple(numbers.values()))

    def _flush(self, *groups: Group) -> None:
        """Move what was noted of these groups to their curves; of all groups when none is named."""
        for group in groups or tuple(self._batches):
            batch = self._batches.pop(group, None)
            if batch is None:
                continue
            for name, column in zip(batch.names, zip(*batch.rows, strict=True), strict=True):
                curve = self.curves.get((group, name))
                if curve is None:
                    if len(self.curves) == MOST_CURVES:
                        where = f"{self.folder / EVENTS}:{self._line}"
                        raise ValueError(f"{where}: metrics: expected at most {MOST_CURVES} names in all.")
                    curve = self.curves[group, name] = Curve()
                curve.extend(batch.steps, column)
                if group == "seconds":
                    phase = self.phases.setdefault(name, PhaseTime())
                    phase.times += len(column)
                    phase.total += sum(column)
                    phase.longest = max(phase.longest, *column)

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
