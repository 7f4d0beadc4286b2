"""Stopping a run by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "stop_on_signal"]


class Stop:
    """Whether the run is to stop after this step."""

    is_set = False


@contextmanager
def stop_on_signal() -> Generator[Stop]:
    """The first Ctrl-C (or SIGTERM) lets the step finish and the run save; the second stops at once."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set:
            raise KeyboardInterrupt
        stop.is_set = True
        # Not through sys.stderr: the signal may come while something is being written there.
        os.write(2, b"stopping after this step, which will be saved; press Ctrl-C again to stop at once\n")

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:
        # Only the main thread may set handlers; a run in another thread is stopped by its owner.
        before.clear()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
