"""A process for each run, forked from one that has imported the parts of the recipe already."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from .run import main

__all__ = ["preload", "run_process"]

# With accelerated libraries in it, a fork is not safe on macOS.
_CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_ALWAYS = ("torch", "unirl.league.run", "unirl.league.start", "unirl.loop.step", "unirl.core.recipe.compose")


def preload(modules: Iterable[str]) -> None:
    """Import these once, before the first run: on a small model imports take as long as the training of a run.

    No effect where a run was started before.
    """
    _CONTEXT.set_forkserver_preload([*_ALWAYS, *modules])


def run_process(job: Path, output: Path) -> int:
    """Run a job in a separate process, its output in a file. Returns the exit code, below 0 for a signal."""
    process = _CONTEXT.Process(target=_run, args=(job, output))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(job: Path, output: Path) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.exit(main(job))
