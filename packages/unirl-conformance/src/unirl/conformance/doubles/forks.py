"""Processes forked from one that has imported torch, by the fork server of `multiprocessing`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

__all__ = ["Fork", "wait_for"]

SLOW = ("torch", "torch.distributed.fsdp", "peft")
"""Modules whose import is nearly all that starting a process takes. The server imports those that are loaded here."""
TAIL = 3000
"""Letters of the output of a process that a message quotes."""


class Fork:
    """A process that calls a function of a module and ends; the first of a session of its own."""

    def __init__(
        self, function: Callable[..., None], *args: Any, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """log: takes what it prints, its traceback too.  environment: laid over that of this process.

        function, args: pickled. It finds modules where this process does, and so do those that it starts.
        """
        context = get_context("forkserver")
        # `__main__` once, or every process imports it again.
        context.set_forkserver_preload(["__main__", *(name for name in SLOW if name in sys.modules)])
        path = os.pathsep.join(filter(None, sys.path))
        laid = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        self.log = log
        self._process = context.Process(target=_run, args=(str(log), laid, pickle.dumps((function, args))))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready for `multiprocessing.connection.wait` when it has ended."""
        return self._process.sentinel

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code when it ends in time, 0 when it did its work; negative when a signal ended it."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def check(self, name: str) -> None:
        """Raise AssertionError with the end of its output when it failed or was killed. name: of it, in the message."""
        code = self.wait(0)
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        assert not code, f"{name} {how}: {self.tail()}"

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-TAIL:] if self.log.exists() else ""

    def kill(self) -> None:
        """End it and its process group, for certain; it has ended when this returns."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may not have a group of its own yet.
        self._process.kill()
        self._process.join()


def wait_for(forks: Mapping[str, Fork], *, within_s: float) -> None:
    """Wait until all have done their work. forks: by the names that a message gives them.

    Raises AssertionError with the end of its output for the first that fails, for others may wait for it, and when some
    are not done in time.
    """
    running, end = dict(forks), time.monotonic() + within_s
    while running:
        ended = wait([fork.sentinel for fork in running.values()], max(0.0, end - time.monotonic()))
        late = "; ".join(f"{name}: {fork.tail()}" for name, fork in running.items())
        assert ended, f"not done after {within_s:g} s: {late}"
        for name, fork in list(running.items()):
            if fork.sentinel in ended:
                fork.check(name)
                del running[name]


def _run(log: str, environment: Mapping[str, str], call: bytes) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    # Not before: a module that is not found is told in the log.
    function, args = pickle.loads(call)
    function(*args)
