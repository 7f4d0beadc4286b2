"""The seconds of each phase of a step, and whose failures they are."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from .parts import attributed

__all__ = ["Phases"]


class Phases:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *, owner: str = "the loop") -> Generator[None]:
        """Time a phase, and attribute what fails in it to `owner`."""
        start = time.perf_counter()
        try:
            with attributed(owner, phase=name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
