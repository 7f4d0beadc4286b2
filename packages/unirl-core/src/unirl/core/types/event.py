"""Events: one thing that happened in a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened.

    Kinds: `loading` (for listeners alone: the file does not exist yet), `run_started`, `run_resumed`, `rollout`,
    `step` (metrics and phase times), `evaluated`, `images`, `checkpoint_saved`, `exported`, `finding` (something a user
    should know), `run_finished`.
    """

    kind: str
    step: int
    """Steps completed when it happened."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    data: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """JSON-able values."""
    read_from: str = field(default="", compare=False)
    """File and line; empty for one that was not read from a file."""
