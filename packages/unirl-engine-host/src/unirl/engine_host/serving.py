"""Server side: a program in the engine's environment that answers calls from a socket.

Run as a script by `unirl.engine_host.process`, using only the standard library until the engine is imported:

    python -I serving.py SOCKET_FD LIFELINE_FD MODULE:FUNCTION FOLDER

The process started by the host is a guard, which forks the server before importing anything. It kills the server and
all its children as soon as the host is gone: the lifeline is a pipe whose other end the host holds, and the system
closes it however the host ends. The guard then also removes the host's temporary folder. Once the guard has exited,
nothing is left.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from getpass import getuser
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any

__all__ = ["Answer", "Call", "answer_calls", "calls_of", "guard", "rendezvous"]

Answer = tuple[Any, Mapping[str, Any]]
"""A JSON-able value, and tensors."""
Call = Callable[[Mapping[str, Any], Mapping[str, Any]], Answer]
"""A call: takes JSON-able arguments and tensors, by name."""
CALLS = ("version", "load", "generate", "load_weights", "sleep", "wake")
"""Callable by the host of an engine."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Constants from linux/prctl.h."""
GOING_S = 0.5
"""Time between a host closing its files and its exit."""
POLL_S = 0.1
"""Polling interval of the guard for events without a file descriptor."""


def calls_of(server: object) -> Mapping[str, Call]:
    """The calls of an engine: its methods, by name."""
    return {name: getattr(server, name) for name in CALLS}


def rendezvous() -> str:
    """`init_method` for a torch process group within this engine, in any of its processes.

    A file, since all ranks are on one host: torch's TCP store listens on every interface, whatever host it is given.
    """
    return f"file://{gettempdir()}/rendezvous"


def guard(lifeline: int, connection: int, folder: Path) -> None:
    """Fork. Returns in the child, the server; the parent exits with the server's status once its group is gone."""
    host = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = os.fork()
    if not server:
        os.close(lifeline)
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    # The connection must close for the host when the server ends.
    os.close(connection)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status: int | None = None
    while status is None:
        ended, result = os.waitpid(-1, os.WNOHANG)
        if ended == server:
            status = result
        elif not ended:
            readable, _, _ = select.select([lifeline], [], [], POLL_S)
            if (readable and not os.read(lifeline, 1)) or os.getppid() != host:
                break
    _end_all(server)
    # A live host removes the folder itself, after reading the log in it. A dying host closes its files shortly
    # before its children are reparented.
    deadline = time.monotonic() + GOING_S
    while status is None and os.getppid() == host and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    if os.getppid() != host:
        shutil.rmtree(folder, ignore_errors=True)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        # Die by the same signal, so that the host sees how the server died; SIGKILL has no handler to reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_all(server: int) -> None:
    """Kill the server's group and its orphans, until this process has no children."""
    while True:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            # Processes that moved to another group.
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def answer_calls(connection: socket.socket, calls: Mapping[str, Call]) -> None:
    """Answer calls in order until the host closes the connection. An exception is sent back as the answer."""
    from unirl.engine_host.frames import UNCHANGED, Unchanged, read_frame, to_frame

    with connection, connection.makefile("rb") as stream:

        def receive(size: int) -> bytes:
            data = stream.read(size)
            if len(data) < size:
                raise EOFError
            return data

        connection.sendall(to_frame({"ready": sorted(calls), "pid": os.getpid()}))
        while True:
            try:
                asked, tensors = read_frame(receive)
            except EOFError:
                return
            result: Mapping[str, Any] = {}
            try:
                value, result = calls[asked["call"]](asked["arguments"], tensors)
                header = {"id": asked["id"], "value": value}
            except Exception as error:  # noqa: BLE001 - the host raises it
                traceback.print_exc()
                unchanged = isinstance(error, Unchanged)
                raised = {"raised": type(error).__name__, "text": str(error), UNCHANGED: unchanged}
                header = {"id": asked["id"], **raised}
            del tensors
            sys.stderr.flush()
            connection.sendall(to_frame(header, result))


def _main() -> None:
    connection, lifeline, target, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    guard(lifeline, connection, folder)
    # Engines leave sockets and files in the temporary folder; the guard or the host removes this one. Compiled
    # kernels stay in torch's cache.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(gettempdir()) / f"torchinductor_{getuser()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # The host copied all other modules next to this file.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    module, _, function = target.partition(":")
    calls: Mapping[str, Call] = getattr(import_module(module), function)()
    answer_calls(socket.socket(fileno=connection), calls)
    # An engine's clean shutdown of threads and pools may take seconds, and nothing depends on it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
