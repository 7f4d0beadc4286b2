"""Forks of a process that has imported torch: `python -m unirl.conformance.workbench.forks FD MODULE...`.

A process of its own and not this one is forked, for this one has threads, and locks that they hold.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from .processes import MARK

__all__ = ["Fork", "Forks"]

SLOW = ("torch", "torch.distributed.fsdp", "peft")
"""Modules whose import is nearly all that starting a process takes. Those that are loaded here are loaded there."""
POLL_S = 0.02
NO_MARK = "." * 40
"""Room for a mark."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What a fork is to be and to do."""

    path: Sequence[str]
    environment: Mapping[str, str]
    mark: str
    call: bytes
    """Function and arguments, pickled: they may be of modules that only `path` has."""


class Fork:
    """A fork, the first of a process group of its own."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._status = line, None
        self.pid = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "little")
        assert self.pid, "the process to fork from is gone; what it printed says why"

    def poll(self) -> int | None:
        """Its exit code when it has ended, 0 when it did its work; negative when a signal ended it."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The same, waiting for it so long, or until it ends."""
        if self._status is None and select.select([self._line], [], [], timeout_s)[0]:
            said = self._line.recv(4, socket.MSG_WAITALL)
            self._status = int.from_bytes(said, "little", signed=True) if said else -signal.SIGKILL
            self._line.close()
        return self._status

    def kill(self) -> None:
        """End it and its process group, for certain; it has ended when this returns."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Forks:
    """Starts forks; a context that ends them and the process that they are forks of. That starts with the first."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._started: list[Fork] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for fork in self._started:
            if fork.poll() is None:
                fork.kill()
        if self._server is not None and self._orders is not None:
            self._orders.close()
            self._server.wait()

    def start(
        self,
        function: Callable[..., None],
        *args: Any,
        log: Path,
        mark: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Fork:
        """A fork that calls a function of a module with these arguments, pickled, and ends.

        Its environment is this process's with `environment` laid over it; it finds modules where this one does.
        log: takes what it prints, its traceback too.  mark: see `.processes.marked`; at most 40 bytes.
        """
        orders = self._orders or self._launch()
        order = _Order(
            path=tuple(sys.path),
            environment={**os.environ, **(environment or {}), **({MARK: mark} if mark else {})},
            mark=mark,
            call=pickle.dumps((function, args)),
        )
        mine, its = socket.socketpair()
        with its, log.open("ab") as file:
            data = pickle.dumps(order)
            socket.send_fds(orders, [len(data).to_bytes(8, "little")], [its.fileno(), file.fileno()])
            orders.sendall(data)
        self._started = [fork for fork in self._started if fork.poll() is None]
        self._started.append(Fork(mine))
        return self._started[-1]

    def _launch(self) -> socket.socket:
        mine, its = socket.socketpair()
        with its:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), *(name for name in SLOW if name in sys.modules)],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for this process, which closes the line.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: NO_MARK},
            )
        self._orders = mine
        return mine


def _serve(orders: socket.socket, modules: Sequence[str]) -> None:
    """Fork as asked until the other end is closed; then end every fork."""
    for module in modules:
        import_module(module)
    lines: dict[int, socket.socket] = {}
    while True:
        asked = select.select([orders], [], [], POLL_S if lines else None)[0]
        for pid in list(lines):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _say(lines.pop(pid), os.waitstatus_to_exitcode(status))
        if not asked:
            continue
        head, files, _, _ = socket.recv_fds(orders, 8, 2)
        if not head:
            break
        size = int.from_bytes(head, "little")
        data = orders.recv(size, socket.MSG_WAITALL)
        line, log = socket.socket(fileno=files[0]), files[1]
        pid = os.fork()
        if not pid:
            for held in (orders, line, *lines.values()):
                held.close()
            _become(pickle.loads(data), log=log)
        os.close(log)
        # Here and there: the group is there for whoever knows the number.
        os.setpgid(pid, pid)
        lines[pid] = line
        _say(line, pid)
    for pid in lines:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _say(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody is interested any more
        line.send(number.to_bytes(4, "little", signed=True))


def _become(order: _Order, *, log: int) -> None:
    """Do what was ordered and end, in the fork."""
    code = 1
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        if order.mark:
            _show(order.mark)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.path[:] = order.path
        function, args = pickle.loads(order.call)
        function(*args)
        code = 0
    except BaseException:  # noqa: BLE001 - a process ends here, and says why as any other does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show(mark: str) -> None:
    """Write the mark where the system looks for the environment of a process: it is as it was at the start of one, and
    forks have that of the process that they are forks of."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    data = mark.encode()
    assert len(data) <= len(NO_MARK), f"mark {mark!r} is longer than {len(NO_MARK)} bytes"
    ctypes.memmove(libc.getenv(MARK.encode()), data + b"\0" * (len(NO_MARK) - len(data)), len(NO_MARK))


if __name__ == "__main__":
    # Pickles name the module, which is `__main__` here.
    from unirl.conformance.workbench.forks import _serve as serve

    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
