"""Forks in place of separate processes: neither the program nor its parent can tell the difference."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest

pytestmark = pytest.mark.keyed

PROGRAM = """
import json, multiprocessing, os, signal, sys, tempfile

def work(number):
    print("child", os.environ["WORD"], number, multiprocessing.parent_process().name, flush=True)
    os._exit(number)

if __name__ == "__main__":
    name, file, how = sys.argv
    print(os.getcwd(), os.environ["WORD"], tempfile.gettempdir(), os.read(int(file), 9), sys.flags.isolated, flush=True)
    print(json.dumps(sys.argv[1:]), sys.stdin.read(), os.getsid(0) == os.getpid(), flush=True)
    child = multiprocessing.get_context("spawn").Process(target=work, args=(5,))
    child.start()
    child.join()
    print(child.exitcode, flush=True)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "raise":
        raise KeyError("no such layer")
    sys.exit(how if not how.isdigit() else int(how))
"""
WAITS = "import time; print('up', flush=True); time.sleep(600)"


@functools.cache
def python() -> str:
    environment = tuple(os.environ.items())
    return fork_server.stub(sys.executable, preload=("json",), environment=environment, flags=("-I",))


@pytest.mark.parametrize("how", ["0", "7", "a message", "raise", "SIGKILL", "SIGTERM"])
def test_a_fork_is_told_does_and_ends_as_a_process_of_its_own(how: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ends: list[tuple[int, list[str]]] = []
    for interpreter in (sys.executable, python()):
        read_end, write_end = os.pipe()
        os.write(write_end, b"by number")
        done = subprocess.run(
            [interpreter, "-I", str(script), str(read_end), how],
            input="typed",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "WORD": "told", "TMPDIR": str(tmp_path)},
            pass_fds=(read_end,),
            start_new_session=True,
            timeout=60,
        )
        os.close(read_end)
        os.close(write_end)
        lines = [line.replace(str(read_end), "FILE") for line in done.stdout.splitlines()]
        # Frames of the fork server come before those of the program.
        ends.append((done.returncode, [line for line in lines if not line.startswith(("  ", "Traceback"))]))
    assert ends[0] == ends[1]
    assert "child told 5 MainProcess" in ends[0][1] and "5" in ends[0][1]


def test_a_fork_ends_with_its_stub() -> None:
    process = subprocess.Popen([python(), "-I", "-c", WAITS], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGTERM
    began = time.monotonic()
    # The fork holds the other end.
    assert process.stdout.read() == b""
    assert time.monotonic() - began < 30
    process.stdout.close()
