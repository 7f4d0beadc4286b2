"""A service for conformance: the real one, on loopback, with the scorer `brightness`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .own_service import OwnService

__all__ = ["write"]

_RUNNING: list[OwnService] = []
"""Each ends with this process."""


def write(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Start a service and return the settings that reach it.

    Raises ModuleNotFoundError where the service or the reward `brightness` is not installed.
    """
    for module in ("unirl.reward_service", "unirl.rewards.rules"):
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            name = module.replace(".", "_")
            raise ModuleNotFoundError(f"No module named {module!r}", name=name)
    file = folder / "rewards.yaml"
    file.write_text("scorers:\n  brightness:\n    use: brightness\n", encoding="utf-8")
    _RUNNING.append(OwnService(file, log=folder / "log.jsonl"))
    return {"urls": [_RUNNING[-1].url], "scorer": "brightness"}
