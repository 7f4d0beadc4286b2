"""Killing engines, and checking for leftover processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

__all__ = ["kill_in_sync", "kill_soon", "mark_of", "processes_of", "stop"]


def stop(pid: int) -> None:
    """Stop the process, so that the next call is still pending when it is killed."""
    os.kill(pid, signal.SIGSTOP)


def kill_soon(pid: int) -> None:
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()


def kill_in_sync(process: Any, weights: Path) -> None:
    """Kill the process started by the sync as soon as its weights are being written."""
    while not (process.pid and list(weights.iterdir())):
        threading.Event().wait(0.002)
    os.kill(process.pid, signal.SIGKILL)


def mark_of(process: Any) -> str:
    """The folder passed to its processes, since others may run the same engine on this machine."""
    mark = f"/{process._folder.name} "
    assert processes_of(mark)
    return mark


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes on this machine that contain these words."""
    result: list[str] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in words:
            result.append(words)
    return result
