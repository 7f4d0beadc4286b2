"""Engines that are killed, and what is left of them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

__all__ = ["kill_in_sync", "kill_soon", "mark_of", "processes_of", "stop"]


def stop(pid: int) -> None:
    """Hold it, so that what is asked next is still on its way when it is killed."""
    os.kill(pid, signal.SIGSTOP)


def kill_soon(pid: int) -> None:
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()


def kill_in_sync(process: Any, weights: Path) -> None:
    """Kill the process that the sync starts, as soon as the weights for it are being written."""
    while not (process.pid and list(weights.iterdir())):
        threading.Event().wait(0.002)
    os.kill(process.pid, signal.SIGKILL)


def mark_of(process: Any) -> str:
    """The folder that its processes are told, for others may run the same engine on this machine."""
    mark = f"/{process._folder.name} "
    assert processes_of(mark)
    return mark


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes of this machine that have these words."""
    found: list[str] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in words:
            found.append(words)
    return found
