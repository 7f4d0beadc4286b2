"""Processes that start with everything imported, because they are forked from one that has imported it.

`stub(...)` starts the process that forks, once for all tests of a process that ask for the same, and gives the "Python"
that is run in place of an interpreter: it hands its arguments, environment, folder and open files, under their numbers,
to that process, lives as long as the fork does and ends as the fork ended. Children that a fork spawns by
`multiprocessing` are forks, too. Needs nothing but the standard library, so it runs in any environment.

What differs from a separate process: its parent is the process that forks; a signal to the stub kills it with SIGKILL;
its modules were imported with the environment of the forking process; all forks share the hash seed and the state of
numpy's global generator; functions registered with `atexit` are not called.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import multiprocessing
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path

__all__ = ["stub"]

STUB = """#!{python} -IS
import os, pickle, signal, socket, sys
conn = socket.socket(socket.AF_UNIX)
conn.connect({address!r})
# Its own files are not inheritable, and those that it was started with are.
files = [n for n in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{n}}")]
files = [n for n in files if os.get_inheritable(n)]
data = pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), files))
socket.send_fds(conn, [len(data).to_bytes(8, "little")], files)
conn.sendall(data)
# Whoever waits for the end of a file waits for the fork alone.
for n in files:
    if n > 2:
        os.close(n)
code = os.waitstatus_to_exitcode(int.from_bytes(conn.recv(4) or b"\\0\\1", "little"))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
START_S = 120.0
MAX_FILES = 253
"""Of one message, see unix(7)."""
KEPT_FREE = 512
"""Numbers of files that what is imported does not take, so that forks can."""

Call = tuple[list[str], dict[str, str], str, list[int]]
"""Arguments, environment, folder, and numbers of the open files."""


@functools.cache
def stub(
    python: str,
    *,
    preload: tuple[str, ...],
    optional: tuple[str, ...] = (),
    environment: tuple[tuple[str, str], ...],
    flags: tuple[str, ...] = (),
) -> str:
    """The path of the stub. The process behind it ends with the one that asked first.

    python: the interpreter, started with `flags` and `environment`.  preload: modules to import.  optional: those that
    may be missing.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, path = folder / "fork.sock", folder / "warm-python"
    path.write_text(STUB.format(python=python, address=str(address)))
    path.chmod(0o755)
    words = [str(address), str(path), ",".join(preload), ",".join(optional)]
    server = subprocess.Popen([python, *flags, __file__, *words], stdin=subprocess.PIPE, env=dict(environment))
    atexit.register(server.communicate, timeout=30)
    end = time.monotonic() + START_S
    while not address.exists():
        assert server.poll() is None and time.monotonic() < end, f"the forking process of {python} did not come up"
        time.sleep(0.05)
    (folder / "fork.pid").write_text(str(server.pid))
    return str(path)


def main(address: str, path: str, preload: str, optional: str) -> None:
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(KEPT_FREE)]
    for name in filter(None, preload.split(",")):
        __import__(name)
    for name in filter(None, optional.split(",")):
        with contextlib.suppress(ImportError):
            __import__(name)
    for file in free:
        os.close(file)
    sys.stdout.flush()
    # Forks leave these objects alone, so that their pages stay shared.
    gc.collect()
    gc.freeze()
    partial = f"{address}.partial"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(partial)
    listener.listen(64)
    Path(partial).rename(address)
    # Files that tell of the end of a stub and of its fork.
    forks: dict[socket.socket, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin, *forks, *(end for _, end in forks.values())], [], [])
        for conn, (pid, end) in list(forks.items()):
            if conn in ready and end not in ready:
                # That is how a process is ended by those who started it.
                os.kill(pid, signal.SIGKILL)
            if conn in ready or end in ready:
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    conn.send(status.to_bytes(4, "little"))
                conn.close()
                os.close(end)
                del forks[conn]
        if sys.stdin in ready:
            for pid, _ in forks.values():
                os.kill(pid, signal.SIGKILL)
            return
        if listener in ready:
            conn, _ = listener.accept()
            # All of it is read here: what can be read of a connection later is that its stub has ended.
            call, files = received(conn)
            pid = os.fork()
            if pid == 0:
                for mine in (listener, conn, *forks):
                    mine.close()
                for _, end in forks.values():
                    os.close(end)
                become(call, files, path)
            for file in files:
                os.close(file)
            forks[conn] = pid, os.pidfd_open(pid)


def received(conn: socket.socket) -> tuple[Call, list[int]]:
    head, files, _, _ = socket.recv_fds(conn, 8, MAX_FILES)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        data += conn.recv(size - len(data))
    return pickle.loads(data), files


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the open files these numbers."""
    sys.stdin.close()
    above = max(KEPT_FREE, *numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        assert number < 3 or not Path(f"/proc/self/fd/{number}").exists(), f"file {number} is taken"
        os.dup2(file, number)
        os.close(file)
    if 0 in numbers:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process


def become(call: Call, files: list[int], path: str) -> None:
    """Run what the stub was asked to run, and end as an interpreter would."""
    arguments, environment, folder, numbers = call
    place(files, numbers)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.setsid()
    # It is looked for again, in this environment.
    tempfile.tempdir = None
    multiprocessing.set_executable(path)
    while arguments[0].startswith("-") and arguments[0] != "-c":
        arguments = arguments[1:]
    status = 0
    try:
        if arguments[0] == "-c":
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], vars(module))
        else:
            sys.argv = arguments
            if not sys.flags.isolated:
                sys.path[0] = str(Path(arguments[0]).parent)
                for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
                    if entry:
                        sys.path.insert(1, entry)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int | None):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException:  # noqa: BLE001 - a process ends here, and says why as any other does
        sys.excepthook(*sys.exc_info())
        status = 1
    # A program may have closed them.
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            output.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
