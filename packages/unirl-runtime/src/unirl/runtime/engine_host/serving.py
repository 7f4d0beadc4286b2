"""The server's side: a program in the engine's own environment that answers calls from the socket that it was given.

Run as a script by `unirl.runtime.engine_host.process`, with the standard library alone until the engine is imported:

    python -I serving.py SOCKET_FD LIFELINE_FD MODULE:FUNCTION FOLDER

The process that the host starts stays what it is, a guard, and forks the server before anything is imported. It ends
the server, and whatever that started, as soon as the host is gone: the lifeline is a pipe of which the host holds the
other end, and the system closes it however the host ends. It then removes the host's folder as well, which is
temporary. The guard's own end says that nothing is left.
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

__all__ = ["Answer", "Call", "answer_calls", "calls_of", "guard"]

Answer = tuple[Any, Mapping[str, Any]]
"""A JSON-able value, and tensors."""
Call = Callable[[Mapping[str, Any], Mapping[str, Any]], Answer]
"""Takes JSON-able arguments and tensors, by name."""
CALLS = ("version", "load", "generate", "load_weights", "sleep", "wake")
"""That the host of an engine makes."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Numbers of linux/prctl.h."""
GOING_S = 0.5
"""Time between the end of a host's files and its own."""
POLL_S = 0.1
"""How soon the guard notices what no file descriptor tells."""


def calls_of(server: object) -> Mapping[str, Call]:
    """The calls of an engine, each of which is the method of that name."""
    return {name: getattr(server, name) for name in CALLS}


def guard(lifeline: int, connection: int, folder: Path) -> None:
    """Fork. Returns in the child, the server; the parent ends as the server did, when all of its group is gone."""
    host = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = os.fork()
    if not server:
        os.close(lifeline)
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    # The host must see the end of the connection when the server ends.
    os.close(connection)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status: int | None = None
    while status is None:
        ended, found = os.waitpid(-1, os.WNOHANG)
        if ended == server:
            status = found
        elif not ended:
            readable, _, _ = select.select([lifeline], [], [], POLL_S)
            if (readable and not os.read(lifeline, 1)) or os.getppid() != host:
                break
    _end_all(server)
    # A host that is there removes the folder itself, when it has read the log in it. One that goes closes its files
    # shortly before it loses its children.
    deadline = time.monotonic() + GOING_S
    while status is None and os.getppid() == host and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    if os.getppid() != host:
        shutil.rmtree(folder, ignore_errors=True)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        # End by the same signal, so that the host sees how the server died; SIGKILL cannot be, nor needs to be, reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_all(server: int) -> None:
    """Kill the server's group and everything that it left, until this process has no child."""
    while True:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            # What left the group for one of its own.
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
    """Answer one call after the other, until the host hangs up. What a call raises is the answer to it."""
    from unirl.runtime.engine_host.frames import read_frame, to_frame

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
            found: Mapping[str, Any] = {}
            try:
                value, found = calls[asked["call"]](asked["arguments"], tensors)
                header = {"id": asked["id"], "value": value}
            except Exception as error:  # noqa: BLE001 - the host raises it
                traceback.print_exc()
                header = {"id": asked["id"], "raised": type(error).__name__, "text": str(error)}
            del tensors
            sys.stderr.flush()
            connection.sendall(to_frame(header, found))


def _main() -> None:
    connection, lifeline, target, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    guard(lifeline, connection, folder)
    # Engines leave sockets and files behind where temporary ones go; the guard or the host removes this folder. What is
    # compiled stays where torch would keep it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(gettempdir()) / f"torchinductor_{getuser()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # Beside the source of this file lies that of everything else which the host sent along.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    module, _, function = target.partition(":")
    calls: Mapping[str, Call] = getattr(import_module(module), function)()
    answer_calls(socket.socket(fileno=connection), calls)
    # An engine's own way out of its threads and pools may take seconds, and nobody waits for anything of it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
