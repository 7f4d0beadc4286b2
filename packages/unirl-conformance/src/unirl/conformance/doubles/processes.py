"""Which threads and child processes run, to see what a part leaves behind."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "Running", "marked", "patience"]

MARK = "UNIRL_TRIAL"
"""An environment variable, which programs inherit whoever started them, and whoever their parent is by now."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """Python's threads and all descendants of this process, at some moment."""

    threads: frozenset[int]
    processes: frozenset[int]

    @classmethod
    def now(cls) -> Running:
        return cls(threads=frozenset(_threads()), processes=frozenset(_descendants()))

    def left(self, *, within_s: float) -> list[str]:
        """What runs now and did not then. Waits a while for what is just ending."""
        end = time.monotonic() + within_s
        while True:
            threads = {ident: name for ident, name in _threads().items() if ident not in self.threads}
            processes = {pid: name for pid, name in _descendants().items() if pid not in self.processes}
            if (not threads and not processes) or time.monotonic() > end:
                return [f"thread {name!r}" for name in threads.values()] + [
                    f"process {pid} ({name})" for pid, name in processes.items()
                ]
            time.sleep(0.02)


def patience(start_s: float) -> float:
    """Seconds for processes to end that took `start_s` to start: a machine that is busy is slow in both."""
    return max(3.0, 2 * start_s)


def marked(mark: str, *, within_s: float) -> list[str]:
    """Programs started with this mark in their environment, wherever they are in the tree. Waits for what is just
    ending. A fork has the environment of what it was forked from, and is not found."""
    end, expected = time.monotonic() + within_s, f"{MARK}={mark}".encode()
    while True:
        result: list[str] = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if expected in entry.read_bytes().split(b"\0"):
                    result.append(f"process {entry.parent.name} ({(entry.parent / 'comm').read_text().strip()})")
        if not result or time.monotonic() > end:
            return result
        time.sleep(0.02)


def _threads() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _descendants() -> dict[int, str]:
    """Process id -> name, of every living child of this process, and theirs. Read from /proc; empty without one."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue  # it ended meanwhile
        # "pid (name) state parent ..."; the name may have spaces and brackets of its own.
        head, _, tail = text.rpartition(")")
        state, parent = tail.split()[:2]
        if state != "Z":
            pid = int(entry.parent.name)
            parents[pid], names[pid] = int(parent), head.partition("(")[2]
    result: dict[int, str] = {}
    newest = {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest and pid not in result}
        result |= {pid: names[pid] for pid in newest}
    return result
