"""Processes of trials: where they are forked from, and which of them a part leaves running."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

import psutil

__all__ = ["MARK", "Running", "forkserver", "marked", "patience"]

MARK = "UNIRL_TRIAL"
"""An environment variable, which programs inherit whoever started them, and whoever their parent is by now."""
SLOW = ("torch", "torch.distributed.fsdp", "peft")
"""Modules whose import takes nearly all of the time to start a process."""
POLL_S = 0.02


def forkserver() -> ForkServerContext:
    """The context of processes that are forked from one that has imported the slow modules of this process."""
    context = multiprocessing.get_context("forkserver")
    # Including `__main__`, which each process would otherwise import again.
    context.set_forkserver_preload(["__main__", *(name for name in SLOW if name in sys.modules)])
    return context


@dataclass(frozen=True, kw_only=True)
class Running:
    """Python's threads and all descendants of this process at some moment: id -> description."""

    threads: Mapping[int | None, str]
    processes: Mapping[int, str]

    @classmethod
    def now(cls) -> Running:
        children = psutil.Process().children(recursive=True)
        return cls(
            threads={thread.ident: f"thread {thread.name!r}" for thread in threading.enumerate()},
            processes={child.pid: text for child in children if (text := _described(child))},
        )

    def left(self, *, within_s: float) -> list[str]:
        """Descriptions of what runs now and did not then. Waits a while for what is just ending."""
        end = time.monotonic() + within_s
        while True:
            now = self.now()
            left = [text for ident, text in now.threads.items() if ident not in self.threads]
            left += [text for pid, text in now.processes.items() if pid not in self.processes]
            if not left or time.monotonic() > end:
                return left
            time.sleep(POLL_S)


def patience(start_s: float) -> float:
    """Seconds for processes to end that took `start_s` to start: a busy machine is slow in both."""
    return max(3.0, 2 * start_s)


def marked(mark: str, *, within_s: float) -> list[str]:
    """Descriptions of programs that were started with this mark in their environment, wherever they are in the process
    tree. Waits for what is just ending. A fork has the environment of the program that it is a fork of."""
    end = time.monotonic() + within_s
    while True:
        programs = psutil.process_iter(["environ"])
        # None without the permission to read it.
        left = [_described(program) for program in programs if (program.info["environ"] or {}).get(MARK) == mark]
        if not any(left) or time.monotonic() > end:
            return [text for text in left if text]
        time.sleep(POLL_S)


def _described(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"process {process.pid} ({process.name()})"
    except psutil.NoSuchProcess:
        return ""
