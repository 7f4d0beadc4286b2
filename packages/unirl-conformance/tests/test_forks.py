"""Forks: they do what they are asked, say how it ended, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.workbench import forks as module
from unirl.conformance.workbench.forks import Forks
from unirl.conformance.workbench.processes import Running, marked


def write(path: Path, text: str) -> None:
    path.write_text(f"{text} {os.environ.get('COLOUR')} {os.getpid()}")
    print(f"wrote {text}")


def fail() -> None:
    raise ValueError("no such colour")


def start_another_and_wait() -> None:
    subprocess.Popen(["sleep", "60"])
    time.sleep(60)


def start_one_in_a_session_of_its_own() -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    # What the process has imported beforehand only makes it slower here.
    monkeypatch.setattr(module, "SLOW", ())
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with Forks() as started:
        yield started


def test_a_fork_does_what_it_is_asked_and_ends(forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    one = forks.start(_here("write"), tmp_path / "one", "red", log=log, environment={"COLOUR": "blue"})
    other = forks.start(_here("write"), tmp_path / "other", "green", log=log)
    assert (one.wait(), other.wait()) == (0, 0)
    assert (tmp_path / "one").read_text() == f"red blue {one.pid}"
    assert (tmp_path / "other").read_text() == f"green {os.environ.get('COLOUR')} {other.pid}"
    assert sorted(log.read_text().splitlines()) == ["wrote green", "wrote red"]


def test_a_fork_that_fails_says_why(forks: Forks, tmp_path: Path) -> None:
    failing = forks.start(_here("fail"), log=tmp_path / "log")
    assert failing.wait() == 1
    assert failing.poll() == 1
    assert "ValueError: no such colour" in (tmp_path / "log").read_text()


def test_a_fork_is_ended_with_all_that_it_started(forks: Forks, tmp_path: Path) -> None:
    waiting = forks.start(_here("start_another_and_wait"), log=tmp_path / "log", mark="trial-of-two")
    while len(marked("trial-of-two", within_s=0)) < 2:
        assert waiting.poll() is None
        time.sleep(0.01)
    waiting.kill()
    assert waiting.poll() == -signal.SIGKILL
    assert marked("trial-of-two", within_s=10) == []


def test_what_left_its_group_is_still_found_by_the_mark(forks: Forks, tmp_path: Path) -> None:
    assert forks.start(_here("start_one_in_a_session_of_its_own"), log=tmp_path / "log", mark="trial").wait() == 0
    (left,) = marked("trial", within_s=0)
    assert left.endswith("(sleep)")
    os.kill(int(left.split()[1]), signal.SIGKILL)
    assert marked("trial", within_s=10) == []


def test_the_end_of_the_context_ends_every_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SLOW", ())
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    before = Running.now()
    with Forks() as forks:
        forks.start(_here("start_another_and_wait"), log=tmp_path / "log", mark="trial-at-the-end")
        assert before.left(within_s=0) != []
    assert before.left(within_s=10) == []
    assert marked("trial-at-the-end", within_s=10) == []


def _here(name: str) -> Any:
    """A function of this file, as a module that a fork can find: pytest has it under another name."""
    __import__("test_forks")
    return getattr(sys.modules["test_forks"], name)
