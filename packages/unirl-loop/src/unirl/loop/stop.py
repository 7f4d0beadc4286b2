"""Stopping a run by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Preempted", "Stop", "stop_on_signal"]

URGENT = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send some seconds before they kill: Slurm either of them (`--signal=B:USR1@120`), Kubernetes the
first."""


class Preempted(BaseException):
    """An urgent stop, raised where it comes: not an error, so nothing on the way handles or wraps it."""


class Stop:
    """Whether the run is to stop after this step."""

    is_set = False
    _is_urgent = False
    _may_interrupt = False

    @contextmanager
    def interrupting(self) -> Generator[None]:
        """Inside, an urgent stop raises Preempted at once, one that came before too: for phases that change no weights
        of training, after which a checkpoint is the one before them."""
        self._may_interrupt = True
        try:
            if self._is_urgent:
                raise Preempted
            yield
        finally:
            self._may_interrupt = False

    def ask(self, *, urgently: bool) -> None:
        """Raises Preempted inside of `interrupting`, if it is urgent."""
        self.is_set, self._is_urgent = True, self._is_urgent or urgently
        if urgently and self._may_interrupt:
            # Once: schedulers send several signals, and what ends here cleans up.
            self._may_interrupt = False
            raise Preempted


@contextmanager
def stop_on_signal() -> Generator[Stop]:
    """The first Ctrl-C lets the step finish and the run save; the second stops at once. SIGTERM and SIGUSR1 let at most
    the training of a step finish, and interrupt everything else; further ones change nothing, as schedulers send both.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        is_urgent = number in URGENT
        if stop.is_set and not is_urgent:
            raise KeyboardInterrupt
        told = "stopping now, or after the training of this step" if is_urgent else "stopping after this step"
        # Not through sys.stderr: the signal may come while something is being written there.
        os.write(2, f"{told}, and saving; press Ctrl-C{' again' * (not is_urgent)} to stop at once\n".encode())
        stop.ask(urgently=is_urgent)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, *URGENT):
            before[number] = signal.signal(number, handle)
    except ValueError:
        # Only the main thread may set handlers; a run in another thread is stopped by its owner.
        before.clear()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
