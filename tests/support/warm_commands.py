"""`unirl` commands as separate processes that start with everything imported, see `warm_workers`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import warm_workers


@dataclass(frozen=True)
class Command:
    """A command that runs.  stub: lives as long, and has its output and exit code.  process: the command itself, the
    leader of a process group."""

    stub: subprocess.Popen[str]
    process: psutil.Process


def start(*words: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Command:
    """environment: beside that of this process."""
    python = warm_workers.python()
    server = psutil.Process(int(Path(python).with_name("fork.pid").read_text()))
    before = {child.pid for child in server.children()}
    stub = subprocess.Popen(
        [python, str(Path(sys.executable).with_name("unirl")), *words],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while stub.poll() is None:
        for child in server.children():
            # Ray's workers are forked from the same process, and run elsewhere.
            with contextlib.suppress(psutil.Error):
                if child.pid not in before and Path(child.cwd()) == cwd.resolve():
                    return Command(stub, child)
        time.sleep(0.01)
    raise AssertionError(f"the command ended at once: {stub.communicate()[0]}")
