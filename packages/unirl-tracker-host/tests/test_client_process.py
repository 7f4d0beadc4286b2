"""A tracking library in a separate process: order, failures, slowness, and runs that are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from unirl.tracker_host.client_process import ClientProcess, TrackerFailed
from unirl.tracker_host.client_tracker import kept_id

LIBRARY = """
import time
from pathlib import Path

class Client:
    def __init__(self, folder):
        self.folder = Path(folder)
        print("hello from the library", flush=True)

    def start(self, id):
        return f"started {id}"

    def log(self, step, wait_s=0.0):
        time.sleep(wait_s)
        if step < 0:
            raise ValueError(f"http://ada:hunter2@host refused {step} for s3cr3t")
        with (self.folder / "steps").open("a") as file:
            file.write(f"{step} ")

    def take(self, content):
        pass

    def finish(self, status):
        (self.folder / "status").write_text(status)
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ClientProcess]]:
    (tmp_path / "acme_library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ACME_TOKEN", "s3cr3t")
    started: list[ClientProcess] = []

    def start() -> ClientProcess:
        started.append(
            ClientProcess("acme_library:Client", str(tmp_path), log=tmp_path / "client.log", secrets=("ACME_TOKEN",))
        )
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_calls_arrive_in_order_and_a_run_does_not_wait_for_them(
    client: Callable[[], ClientProcess], tmp_path: Path
) -> None:
    process = client()
    assert process.call("start", 7, timeout_s=30) == "started 7"
    began = time.monotonic()
    for step in range(5):
        process.send("log", step, wait_s=0.2)
    # Half of the second that the five calls take at least.
    assert time.monotonic() - began < 0.5
    process.call("finish", "done", timeout_s=30)
    process.wait()
    assert (tmp_path / "steps").read_text() == "0 1 2 3 4 "
    assert (tmp_path / "status").read_text() == "done"
    assert "hello from the library" in (tmp_path / "client.log").read_text()


def test_a_call_that_fails_is_raised_by_a_later_one_without_secrets(
    client: Callable[[], ClientProcess], tmp_path: Path
) -> None:
    process = client()
    process.send("log", -1)
    with pytest.raises(TrackerFailed, match=r"ValueError: http://\*\*\*@host refused -1 for \*\*\*\.") as raised:
        process.call("start", 1, timeout_s=30)
    printed = (tmp_path / "client.log").read_text()
    assert "Traceback" in printed and str(tmp_path / "client.log") in str(raised.value)
    assert "hunter2" not in printed and "s3cr3t" not in printed


def test_a_library_that_falls_too_far_behind_is_given_up(client: Callable[[], ClientProcess]) -> None:
    process = client()
    process.send("log", 1, wait_s=60)
    content = b"0" * 2**24
    with pytest.raises(TrackerFailed, match="too slow: more than 256 MiB wait to be logged"):
        # 16 fill what may wait; the answer may come some calls later.
        for _ in range(40):
            process.send("take", content)
            time.sleep(0.01)


def test_an_answer_that_does_not_come_is_not_waited_for(client: Callable[[], ClientProcess]) -> None:
    process = client()
    process.call("start", 1, timeout_s=30)
    with pytest.raises(TrackerFailed, match=r"no answer within 0\.2 s"):
        process.call("log", 1, wait_s=60, timeout_s=0.2)


def test_a_run_that_is_killed_is_a_failed_one_whose_calls_are_done(
    client: Callable[[], ClientProcess], tmp_path: Path
) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom unirl.tracker_host.client_process import ClientProcess\n"
        "process = ClientProcess('acme_library:Client', sys.argv[1], log=Path(sys.argv[1]) / 'client.log')\n"
        "process.call('start', 1, timeout_s=30)\nprocess.send('log', 3, wait_s=0.2)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    until = time.monotonic() + 30
    text = ""
    while text != "failed" and time.monotonic() < until:
        time.sleep(0.05)
        with suppress(FileNotFoundError):
            text = (tmp_path / "status").read_text()
    assert text == "failed" and (tmp_path / "steps").read_text() == "3 "


def test_a_resumed_run_continues_the_run_of_its_folder(tmp_path: Path) -> None:
    kept = tmp_path / "unirl-run.json"
    assert kept_id(kept, asked="mine", resumed=True, key="tracker.acme") == "mine"
    kept.write_text('{"id": "abcd1234"}')
    assert kept_id(kept, asked=None, resumed=True, key="tracker.acme") == "abcd1234"
    assert kept_id(kept, asked="", resumed=False, key="tracker.acme") is None
    with pytest.raises(TrackerFailed, match=r"tracker\.acme\.run_id: got 'other', .* belongs to run 'abcd1234'"):
        kept_id(kept, asked="other", resumed=True, key="tracker.acme")
    kept.write_text("{")
    with pytest.raises(TrackerFailed, match=r"unirl-run\.json does not hold a run id"):
        kept_id(kept, asked=None, resumed=True, key="tracker.acme")
