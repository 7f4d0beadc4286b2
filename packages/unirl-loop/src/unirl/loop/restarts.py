"""Starting a run again by itself after it lost a process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from unirl.core.errors import PlanRejected, ProcessLost

from .checkpoints import Checkpoints
from .run_folder import CHECKPOINTS

__all__ = ["with_restarts"]

WAIT_S = 600.0
"""How long a restart waits for machines: schedulers take minutes to replace one."""
AGAIN_S = 10.0
"""Time between two looks whether they are there."""

R = TypeVar("R")


def with_restarts(
    attempt: Callable[[Path | None, Sequence[str]], R], *, limit: int, folder: Path, resume: Path | None
) -> R:
    """The result of `attempt(resume, findings)`, which is called again up to `limit` times, with a finding that says
    why, as long as a process was lost: from the newest checkpoint that an attempt wrote, or as before where none did.
    Later checkpoints, of a run that was resumed from an older one, are of the steps that it replaces.

    Raises whatever else it raises; of a restart PlanRejected after `WAIT_S`, when the machines do not suffice.
    """
    checkpoints, findings = Checkpoints(folder / CHECKPOINTS), list[str]()
    earlier = _identities(checkpoints)
    for restart in range(limit + 1):
        if restart:
            # What the last attempt held, on devices above all.
            gc.collect()
            written = [step for step, identity in _identities(checkpoints).items() if earlier.get(step) != identity]
            resume = checkpoints.at(max(written)) if written else resume
        end = time.monotonic() + (WAIT_S if restart else 0.0)
        while True:
            try:
                return attempt(resume, findings)
            except ProcessLost as error:
                if restart == limit:
                    raise
                findings = [f"restart {restart + 1} of {limit}: {error}"]
                break
            except PlanRejected as error:
                if time.monotonic() >= end:
                    for finding in findings:
                        error.add_note(f"After {finding}")
                    raise
                time.sleep(AGAIN_S)
    raise AssertionError("the last attempt returns or raises")


def _identities(checkpoints: Checkpoints) -> dict[int, tuple[int, int]]:
    """Step -> what tells its checkpoint from one that replaces it."""
    stats = {step: checkpoints.at(step).stat() for step in checkpoints.steps()}
    return {step: (stat.st_ino, stat.st_mtime_ns) for step, stat in stats.items()}
