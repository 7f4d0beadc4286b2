"""The event stream of a run: what happened, in order, as one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..disk import is_at, writing
from ..errors import RunFolderError
from ..strict_json import strict_json
from ..types.event import Event
from .recorded import Recorded

__all__ = ["EventStream", "NotJson", "read_event", "read_events"]

LAST_TIME = 253402300799
"""The end of the year 9999, in seconds since the epoch."""


class EventStream:
    """Appends events to `events.jsonl` and hands each to the listeners, in order.

    A line is written and flushed before any listener sees it; the file is only ever appended to. A number that is not
    finite is null in it. A last line that a crash cut off is removed when the stream opens. Raises DiskFull for a line
    that does not fit, and RunFolderError once the file is not at its path any more.
    """

    def __init__(self, path: Path | None = None, *, step: int = 0) -> None:
        """step: that the run starts after."""
        self.last_step = step
        """The highest step of an event."""
        self._listeners: list[Callable[[Event], None]] = []
        self._said: set[str] = set()
        self._file, self._gone = None, ""
        if path is not None:
            # Absolute: code of a run may change the working directory.
            path = path.absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path):
                _mend_last_line(path)
                # Unbuffered: what a full disk refused is not kept to be written later.
                self._file = path.open("ab", buffering=0)

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def emit(self, kind: str, *, step: int, **data: Any) -> Event:
        if "time" in data:
            raise ValueError(f"event {kind!r}: 'time' is the time of the event itself; call this value something else.")
        event = Event(kind=kind, step=step, data=data)
        if self._file is not None:
            line = {"kind": event.kind, "step": event.step, "time": round(event.time, 3), **data}
            self._append((strict_json(line, separators=(",", ":")) + "\n").encode())
        self.last_step = max(self.last_step, step)
        for listener in self._listeners:
            listener(event)
        return event

    def check(self) -> None:
        """Raise RunFolderError if the file, or the folder with it, was deleted, moved or replaced since it was opened.

        Its open handle would go on taking lines that nobody can read. Later events go to the listeners alone.
        """
        if self._file is not None and not is_at(self._file.fileno(), path := Path(self._file.name)):
            self._gone = (
                f"{path}: the file that this run writes to is gone: it, or its run folder, was deleted, moved or "
                "replaced. The run stops, because nothing more of it can be saved here. Resume it from where the "
                "folder was moved to; start the run anew if it was deleted."
            )
            self.close()
        if self._gone:
            raise RunFolderError(self._gone)

    def _append(self, line: bytes) -> None:
        """Write a line, or none of it. After one that failed, later events go to the listeners alone."""
        self.check()
        assert self._file is not None
        end, path = os.fstat(self._file.fileno()).st_size, Path(self._file.name)
        try:
            with writing(path):
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except BaseException:
            os.ftruncate(self._file.fileno(), end)
            self.close()
            raise

    def finding(self, text: str, *, step: int, once: str = "") -> None:
        """Something that a user should know. Findings of one `once` key are said the first time only."""
        if not once or once not in self._said:
            self._said.add(once)
            self.emit("finding", step=step, text=text)

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def read_events(path: Path) -> list[Event]:
    """The events of a run; a metric that is null is NaN. A last line that a crash cut off is left out.

    Raises ValueError, with file and line, for any other line that is not an event, and OSError. Half of a surrogate
    pair, which nothing could print, is read as `?`.
    """
    events: list[Event] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}).") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            events.append(read_event(line, where=f"{path}:{number}"))
        except NotJson:
            if number < len(lines):
                raise
    return events


class NotJson(ValueError):
    """A line is not JSON: damaged, or not written to its end."""


def read_event(line: str, *, where: str) -> Event:
    """The event of a line of the file; a metric that is null is NaN. where: file and line, for errors.

    Raises NotJson, and ValueError for JSON that is not an event.
    """
    try:
        item: Any = json.loads(line)
        if "\\ud" in line.lower():
            item = json.loads(json.dumps(item, ensure_ascii=False).encode("utf-8", "replace"))
    # Also a number of thousands of digits, and lists in lists without end.
    except (ValueError, RecursionError) as error:
        raise NotJson(f"{where}: not a JSON object: {error}") from error
    if not isinstance(item, dict) or not item.keys() >= {"kind", "step", "time"}:
        raise ValueError(f"{where}: no event: it needs kind, step and time; found {line[:80]}")
    metrics: Any = cast("dict[str, Any]", item).get("metrics")
    if isinstance(metrics, dict):
        numbers = cast("dict[str, Any]", metrics)
        item["metrics"] = {key: math.nan if value is None else value for key, value in numbers.items()}
    read = Recorded(where=where, values=cast("dict[str, Any]", item))
    time = read.number("time", most=LAST_TIME)
    data = {key: value for key, value in read.values.items() if key not in ("kind", "step", "time")}
    return Event(kind=read.text("kind"), step=read.count("step"), time=time, data=data, read_from=where)


def _mend_last_line(path: Path) -> None:
    """Close a last line that lacks only its end; remove one that a crash cut off, which would read as damage later."""
    content = path.read_bytes() if path.exists() else b""
    start = content.rfind(b"\n") + 1
    if start == len(content):
        return
    try:
        json.loads(content[start:])
    except ValueError:
        os.truncate(path, start)
    else:
        with path.open("ab") as file:
            file.write(b"\n")
