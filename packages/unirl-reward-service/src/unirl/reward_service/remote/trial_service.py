"""A service for conformance: the real one, on loopback, with the scorer `brightness`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.core.cli.discovery import discover

from .own_service import OwnService

__all__ = ["write"]

_RUNNING: list[OwnService] = []
"""Each ends with this process."""


def write(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Start a service and return the settings that reach it.

    Raises PluginNotInstalled where the reward `brightness` is not installed.
    """
    discover().get("reward", "brightness")
    file = folder / "rewards.yaml"
    file.write_text("scorers:\n  brightness:\n    use: brightness\n", encoding="utf-8")
    _RUNNING.append(OwnService(file, log=folder / "log.jsonl"))
    return {"urls": [_RUNNING[-1].url], "scorer": "brightness"}
