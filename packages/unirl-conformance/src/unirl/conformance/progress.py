"""Progress line of a run: position, current claim, remaining time."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TextIO

import pytest

from .report.words import duration

__all__ = ["Progress", "Remaining", "Status"]

TICK_S = 1.0
LINE_S = 20.0
"""Where the line cannot be written over, a new one is written as often as this."""
PRIOR_S = {False: 0.3, True: 3.0}
"""What a claim takes, before anything was measured: with an engine in process, and with one that has to be started."""
PRIOR_WEIGHT = 3
"""How many measurements that counts as."""


class Status:
    """What a process is busy with, for the process that shows it: a file each in a folder that they share."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None where nobody looks."""
        self._path = folder / str(os.getpid()) if folder is not None else None

    @contextmanager
    def busy(self, text: str) -> Generator[None]:
        """Says `text` as long as the block runs."""
        if self._path is None:
            yield
            return
        self._path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)


class Remaining:
    """Estimates how long claims will take from those of their group that are done."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, bool], int] = {}
        self._done: dict[tuple[str, bool], list[float]] = {}

    def add(self, group: tuple[str, bool]) -> None:
        """One more to come. group: the kind of its subject, and whether it has an engine that is started for it."""
        self._left[group] = self._left.get(group, 0) + 1

    def done(self, group: tuple[str, bool], seconds: float) -> None:
        self._left[group] = max(0, self._left.get(group, 0) - 1)
        self._done.setdefault(group, []).append(seconds)

    @property
    def seconds(self) -> float:
        """Of all that are to come, one after the other."""
        total = 0.0
        for group, left in self._left.items():
            known = self._done.get(group, [])
            mean = (sum(known) + PRIOR_WEIGHT * PRIOR_S[group[1]]) / (len(known) + PRIOR_WEIGHT)
            total += left * mean
        return total


class Progress:
    """A pytest plugin of the controlling process, in place of pytest's dots."""

    def __init__(self, *, with_programs: Iterable[str], stream: TextIO | None = None) -> None:
        """with_programs: ids of the subjects whose engine is a program of its own.  stream: stderr where it is None."""
        self._with_programs = frozenset(with_programs)
        self._stream = stream or sys.stderr
        self._own_stream: TextIO | None = None
        self._remaining = Remaining()
        self._groups: dict[str, tuple[str, bool]] = {}
        self._running: dict[str, float] = {}
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._workers: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_until_ended, daemon=True)
        self._last_line = time.monotonic()
        self._width = 0

        self.folder: Path | None = None
        """Where processes that try claims put their `Status`, while pytest runs."""

    def pytest_configure(self) -> None:
        self.folder = Path(mkdtemp(prefix="unirl-status-"))
        # pytest redirects the descriptor of stderr while a claim runs.
        try:
            self._own_stream = os.fdopen(os.dup(self._stream.fileno()), "w", encoding="utf-8")
        except OSError:
            self._own_stream = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["unirl_status"] = str(self.folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._workers.add(node.gateway.id)
        self._expect(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        began = self._running.pop(nodeid, None)
        if began is not None and nodeid not in self._done:
            self._done.add(nodeid)
            self._remaining.done(self._group(nodeid), time.monotonic() - began)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure is shown at once: the report comes when everything has run."""
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            claim, subject = _named(report.nodeid)
            self._clear()
            out = self._own_stream or self._stream
            out.write(f"failed: {claim} on {self._group(report.nodeid)[0]} {subject}\n")
            out.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
        """No dots: a claim is counted, and nothing is written of it."""
        return (report.outcome, "", "") if isinstance(report, pytest.TestReport) else None

    def pytest_unconfigure(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._clear()
        if self._own_stream is not None:
            self._own_stream.close()
            self._own_stream = None
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def line(self) -> str:
        """`12/340  engine trainside+sd3: log-probs-are-those-of-the-replay (3.2 s)  about 1 min 05 s left`."""
        reply = [f"{len(self._done)}/{len(self._groups)}", *([f"{len(self._failed)} failed"] if self._failed else ())]
        running = min(self._running.items(), key=lambda pair: pair[1], default=None)
        if running is not None:
            nodeid, began = running
            claim, subject = _named(nodeid)
            reply.append(f"{claim} on {self._group(nodeid)[0]} {subject} ({duration(time.monotonic() - began)})")
        if self.folder is not None:
            reply += sorted({text for path in self.folder.iterdir() if (text := _read(path))})
        if self._groups:
            seconds = self._remaining.seconds / max(1, len(self._workers))
            reply.append(f"about {duration(60 * math.ceil(seconds / 60)) if seconds > 60 else f'{seconds:.0f} s'} left")
        return "  ".join(reply)

    def _expect(self, nodeids: Iterable[str]) -> None:
        for nodeid in nodeids:
            if nodeid not in self._groups:
                self._groups[nodeid] = self._group(nodeid)
                self._remaining.add(self._groups[nodeid])
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def _group(self, nodeid: str) -> tuple[str, bool]:
        kind = nodeid.rpartition("/")[2].removeprefix("test_").partition(".")[0].partition("_")[0]
        return kind, _named(nodeid)[1] in self._with_programs

    def _show_until_ended(self) -> None:
        while not self._ended.wait(TICK_S):
            self._show()

    def _show(self) -> None:
        out = self._own_stream or self._stream
        if out.isatty():
            text = self.line()[: _columns(out) - 1]
            out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif time.monotonic() - self._last_line >= LINE_S:
            self._last_line = time.monotonic()
            out.write(self.line() + "\n")
        out.flush()

    def _clear(self) -> None:
        out = self._own_stream or self._stream
        if out.isatty() and self._width:
            out.write("\r" + " " * self._width + "\r")
            out.flush()


def _named(nodeid: str) -> tuple[str, str]:
    """Claim and subject of `suite/test_model_media.py::test_media_has_the_requested_size[sd3]`."""
    claim, _, subject = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    return claim.removeprefix("test_").replace("_", "-"), subject


def _columns(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except OSError:
        return 80


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
