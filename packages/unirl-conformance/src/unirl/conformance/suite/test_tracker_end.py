"""How a tracker ends."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from pathlib import Path
from typing import Literal, get_args

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.tracker import TrackerCase
from unirl.conformance.verdicts import NotRun

Status = Literal["done", "stopped", "failed"]
SETTLES_S = 5.0
"""Longest wait for threads that were told to end. Ending takes milliseconds; a busy machine takes longer."""


@claim("tracker")
def test_a_run_may_end_at_any_time(case: TrackerCase) -> None:
    """A run may be done, stopped or failed, after steps or before it announced itself, and the tracker ends with it.

    A run that fails at once is the one whose reason a user looks for.

    If it fails: let `finish` deal with a run that has no step, no image and no event besides `run_finished`, and with
    every status.
    """
    for status in get_args(Status):
        with case.unannounced_run(f"{status}-at-once") as run:
            run.finish(status)
    for status in ("stopped", "failed"):
        with case.run(f"{status}-after-a-step") as run:
            run.steps((1,))
            run.finish(status)


@claim("tracker")
def test_a_tracker_leaves_nothing_running(case: TrackerCase) -> None:
    """After `finish` no thread, process or open file of the run is left, so the process can end, or continue for weeks.

    What a library starts once for the whole process may stay, as long as it does not keep the process from ending: so
    the second run is the one that is checked.

    If it fails: join the threads in `finish`, close the writers, and end helper processes.
    """
    before = set(threading.enumerate())
    with case.run("first") as first:
        first.steps((1, 2))
        first.finish("done")
    between, helpers = set(threading.enumerate()), _children()
    with case.run("second") as second:
        second.steps((1, 2))
        second.finish("done")
    for thread in set(threading.enumerate()) - between:
        thread.join(SETTLES_S)
    blocking = [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon]
    assert not blocking, f"threads that keep the process from ending are left: {', '.join(blocking)}"
    left = [thread.name for thread in set(threading.enumerate()) - between]
    assert not left, f"threads of the run are left: {', '.join(left)}"
    if sys.platform != "linux":
        raise NotRun("no thread is left; child processes and open files can be looked at on Linux alone")
    assert _children() <= helpers, f"{len(_children() - helpers)} processes of the run are left"
    opened = _open_files(case.folder)
    assert not opened, f"files of the run are still open: {', '.join(opened)}"


def _children() -> set[int]:
    """Process ids of this process's children; without those of multiprocessing's own bookkeeping."""
    multiprocessing.active_children()  # Waits for those that have ended.
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for result in lists for pid in result.read_text().split()}


def _open_files(folder: Path) -> list[str]:
    """Files below a folder that this process has open."""
    result: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
        except OSError:
            continue  # The one that lists this folder is closed by now.
        if target.is_relative_to(folder.resolve()):
            result.append(str(target.relative_to(folder.resolve())))
    return result
