"""Environments: the separate Python environments of external engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["Environment"]


class Environment(Protocol):
    """The object that `EngineSpec.environment` names, as far as the core uses it."""

    @property
    def locks(self) -> Mapping[str, str]:
        """Accelerator -> the lock of its packages."""
        ...

    def of(self, release: str) -> Environment:
        """The environment of another release of the engine."""
        ...

    def is_present(self, accel: str, *, within: Path | None = None) -> bool: ...
    def folder(self, accel: str, *, within: Path | None = None) -> Path: ...
    def command(self, accel: str, *, within: Path | None = None) -> str:
        """The command that makes it."""
        ...

    def make(self, accel: str, *, within: Path | None = None, tell: Callable[[str], None]) -> Path:
        """Make it, or find it; returns its folder. tell: takes a line of progress."""
        ...
