"""A service for conformance: the real one, on loopback, with the scorer `brightness`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["write"]

_RUNNING: list[subprocess.Popen[bytes]] = []
"""Their stdin is held open: each ends with this process."""


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
    command = ("-m", "unirl.core", "reward-service", "serve", str(file), "--port", "0", "--end-with-stdin")
    log = folder / "log.jsonl"
    with log.open("wb") as output:
        service = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
        )
    _RUNNING.append(service)
    assert service.stdout is not None
    line = service.stdout.readline()
    if not line:
        raise RuntimeError(f"the service ended with exit code {service.wait()}: {log.read_text(encoding='utf-8')}")
    return {"urls": [json.loads(line)["url"]], "scorer": "brightness"}
