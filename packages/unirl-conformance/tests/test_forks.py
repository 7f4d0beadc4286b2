"""Forks: they do what they are asked, their failures say how they ended, and they leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles.forks import Fork, wait_for
from unirl.conformance.doubles.processes import MARK, marked


def write(path: Path, text: str) -> None:
    path.write_text(f"{text} {os.environ.get('COLOUR')} {os.getpid()}")
    print(f"wrote {text}\n", end="")  # one write, or lines of two processes mix where output is not buffered


def fail() -> None:
    raise ValueError("no such colour")


def start_another_and_wait() -> None:
    subprocess.Popen(["sleep", "60"])
    print("waits", flush=True)
    time.sleep(60)


def start_one_in_a_session_of_its_own() -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)


@pytest.fixture(autouse=True)
def path_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_a_fork_does_what_it_is_asked_and_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    one = Fork(_here("write"), tmp_path / "one", "red", log=log, environment={"COLOUR": "blue"})
    other = Fork(_here("write"), tmp_path / "other", "green", log=log)
    assert (one.wait(), other.wait()) == (0, 0)
    assert (tmp_path / "one").read_text() == f"red blue {one.pid}"
    assert (tmp_path / "other").read_text() == f"green {os.environ.get('COLOUR')} {other.pid}"
    assert sorted(log.read_text().splitlines()) == ["wrote green", "wrote red"]


def test_a_fork_that_fails_is_named_with_what_it_printed(tmp_path: Path) -> None:
    failing = Fork(_here("fail"), log=tmp_path / "failing")
    waiting = Fork(_here("start_another_and_wait"), log=tmp_path / "waiting")
    try:
        with pytest.raises(AssertionError, match=r"^rank 1 ended with exit code 1: (?s:.*)ValueError: no such colour"):
            wait_for({"rank 0": waiting, "rank 1": failing}, within_s=60)
    finally:
        waiting.kill()


def test_what_a_fork_cannot_import_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def work(): ...\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        work = __import__("only_here").work
        (tmp_path / "only_here.py").unlink()
        failing = Fork(work, log=tmp_path / "log")
    assert failing.wait() == 1
    with pytest.raises(AssertionError, match="No module named 'only_here'"):
        failing.check("it")


def test_a_fork_that_hangs_ends_the_wait_and_one_that_is_killed_is_named(tmp_path: Path) -> None:
    waiting = Fork(_here("start_another_and_wait"), log=tmp_path / "log")
    try:
        while not waiting.tail():
            assert waiting.wait(0.01) is None
        with pytest.raises(AssertionError, match=r"^not done after 0\.1 s: rank 0: waits"):
            wait_for({"rank 0": waiting}, within_s=0.1)
    finally:
        waiting.kill()
    with pytest.raises(AssertionError, match=r"^rank 0 was killed by SIGKILL: waits"):
        wait_for({"rank 0": waiting}, within_s=1)


def test_a_fork_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    waiting = Fork(_here("start_another_and_wait"), log=tmp_path / "log", environment={MARK: "trial-of-one"})
    while not marked("trial-of-one", within_s=0):
        assert waiting.wait(0.01) is None
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    assert marked("trial-of-one", within_s=10) == []


def test_a_program_that_left_its_group_is_still_found_by_the_mark(tmp_path: Path) -> None:
    fork = Fork(_here("start_one_in_a_session_of_its_own"), log=tmp_path / "log", environment={MARK: "trial"})
    assert fork.wait() == 0
    (left,) = marked("trial", within_s=0)
    assert left.endswith("(sleep)")
    os.kill(int(left.split()[1]), signal.SIGKILL)
    assert marked("trial", within_s=10) == []


def _here(name: str) -> Any:
    """A function of this file, as a module that a fork can find: pytest has it under another name."""
    __import__("test_forks")
    return getattr(sys.modules["test_forks"], name)
