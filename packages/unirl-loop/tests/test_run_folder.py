"""Run folders: names that cannot collide, and one process at a time in each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bad_input_page import answer
from unirl.core.errors import RunFolderError
from unirl.loop.run_folder import LOCK_FILE, held_folder, new_folder

HOLD = """
import sys, time
from pathlib import Path
from unirl.loop.run_folder import held_folder
with held_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds a folder."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def ended(other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.communicate()


def test_names_made_at_once_are_all_different(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def make(_: int) -> Path:
        barrier.wait(timeout=30)
        return new_folder(tmp_path / "runs", "quickstart-20260101-000000")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(make, range(8)))
    assert len(set(folders)) == 8
    assert sorted(folder.name.removeprefix("quickstart-20260101-000000") for folder in folders)[:2] == ["", "-2"]
    assert "ends in `-2`" in answer("two runs that start in the same second")
    assert all(folder.is_dir() for folder in folders)


def test_a_folder_of_a_live_process_is_refused_and_says_who_holds_it(tmp_path: Path) -> None:
    other = holder(tmp_path / "run")
    try:
        with pytest.raises(RunFolderError) as caught, held_folder(tmp_path / "run"):
            pass
    finally:
        ended(other)
    message = str(caught.value)
    assert f"process {other.pid} on host {socket.gethostname()!r}, started 20" in message
    assert "run.dir=" in message


def test_of_many_that_want_one_folder_at_once_one_gets_it(tmp_path: Path) -> None:
    begin, decided = threading.Barrier(8), threading.Barrier(8)

    def hold(_: int) -> bool:
        begin.wait(timeout=30)
        try:
            with held_folder(tmp_path / "run"):
                decided.wait(timeout=30)
                return True
        except RunFolderError:
            decided.wait(timeout=30)
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(hold, range(8))) == 1


def test_the_lock_of_a_process_that_was_killed_is_named_and_taken_over(tmp_path: Path) -> None:
    other = holder(tmp_path / "run")
    ended(other)
    assert (tmp_path / "run" / LOCK_FILE).is_file()
    with held_folder(tmp_path / "run") as folder:
        assert f"process {other.pid} on host" in folder.stale
        owner = json.loads((tmp_path / "run" / LOCK_FILE).read_text())
        assert owner["pid"] == os.getpid()


def test_a_lock_of_another_host_is_refused_with_the_file_to_delete(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": "2026-01-01T00:00:00+00:00"}))
    with pytest.raises(RunFolderError, match="'elsewhere'") as caught, held_folder(tmp_path):
        pass
    assert f"delete {lock}" in str(caught.value)
    assert answer("a lock from another host") in str(caught.value)
    lock.unlink()
    with held_folder(tmp_path) as folder:
        assert folder.stale == ""


def test_the_lock_of_a_run_that_took_the_place_of_a_deleted_folder_stays(tmp_path: Path) -> None:
    with held_folder(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        other = holder(tmp_path / "run")
    try:
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == other.pid
    finally:
        ended(other)


def test_a_folder_in_which_nothing_was_written_is_gone_afterwards(tmp_path: Path) -> None:
    with held_folder(tmp_path / "runs" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    with held_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "recipe.json").write_text("{}")
    assert [path.name for path in (tmp_path / "runs" / "one").iterdir()] == ["recipe.json"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(RunFolderError, match=r"run\.dir: .*taken"), held_folder(folder):
            pass
