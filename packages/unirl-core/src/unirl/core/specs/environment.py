"""Environments: the Python environment that an engine runs in as a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["Environment"]


class Environment(Protocol):
    """What `EngineSpec.environment` names, as far as it is looked at here."""

    @property
    def locks(self) -> Mapping[str, str]:
        """Accelerator -> what its packages are locked in."""
        ...

    def of(self, release: str) -> Environment:
        """That of another release of the engine."""
        ...

    def is_present(self, accel: str, *, within: Path | None = None) -> bool: ...
    def folder(self, accel: str, *, within: Path | None = None) -> Path: ...
    def command(self, accel: str, *, within: Path | None = None) -> str:
        """The command that makes it."""
        ...

    def make(self, accel: str, *, within: Path | None = None, tell: Callable[[str], None]) -> Path:
        """Make it, or find it; returns its folder. tell: takes a line on what is being done."""
        ...
