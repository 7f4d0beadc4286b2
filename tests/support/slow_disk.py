"""A file system that threads other than the main one wait for, or that fails under them."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

WITHIN_S = 60.0
"""Longest wait of a write: far above what any machine needs, below the limit of a test."""


class Disk:
    """`os.fsync` of threads: it waits while the disk is `held`, and raises `error`."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self._is_free = threading.Event()
        self._is_free.set()
        self._is_reached = threading.Event()
        self._fsync = os.fsync

    def hold(self) -> None:
        self._is_free.clear()
        self._is_reached.clear()

    def release(self) -> None:
        self._is_free.set()

    def wait_until_reached(self) -> None:
        """Until a thread waits for the disk that is held."""
        assert self._is_reached.wait(WITHIN_S), "nothing was written"

    def fsync(self, file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            if not self._is_free.is_set():
                self._is_reached.set()
                assert self._is_free.wait(WITHIN_S), "nobody released the disk"
            if self.error is not None:
                raise self.error
        self._fsync(file)


@contextmanager
def slow_disk() -> Generator[Disk]:
    """In this process; released and sound again after the block."""
    disk = Disk()
    os.fsync = disk.fsync
    try:
        yield disk
    finally:
        disk.release()
        os.fsync = disk._fsync
