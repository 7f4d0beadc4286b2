"""Transports in separate processes.

Each process is a server of `multiprocessing.managers` with a socket in a folder, where the processes of a run find each
other. Calls on a transport come one at a time; questions of other processes are answered meanwhile, as the role says.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, Self

from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Transport, TransportPlace
from unirl.core.specs.part_config import PartConfig

from .processes import MARK, forkserver

__all__ = ["Setup", "TransportProcess"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The transport that a process builds. Plain data."""

    build: str
    config: PartConfig
    run: str
    address: Any = None
    """Address of the driver's transport; None in the driver."""


class TransportProcess:
    """The transport of one process of a run, called from this one; a context that kills the process at its end."""

    def __init__(self, name: str, setup: Setup, *, folder: Path, mark: str) -> None:
        """Start the process and build its transport; raises the error of `build`.

        folder: of the run, with a short path: sockets lie in it.  mark: see `.processes.marked`.
        """
        self.name = name
        self._manager = _Manager(str(folder / name), ctx=forkserver())
        self._manager.start(_set_up, (mark,))
        try:
            self._served: Any = self._manager.served()  # type: ignore[attr-defined]  # registered below
            self._pid: int = self._served.build(name, pickle.dumps(setup), folder)
        except BaseException:
            self._manager.shutdown()
            raise

    def __call__(self, method: str, *args: Any) -> Any:
        """The result of the transport's method, or its error."""
        return pickle.loads(self._served.call(method, pickle.dumps(args)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # A process that no longer answers is killed below.
        with suppress(Exception):
            self("close")
        self._manager.shutdown()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


@dataclass
class _Served:
    """The transport of this process. Arguments and results are pickled only by the standard library: torch's own way
    shares memory between the processes, which is a transport, too."""

    transport: Transport = field(init=False)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def build(self, name: str, pickled: bytes, folder: Path) -> int:
        """Returns the id of the process."""
        setup: Setup = pickle.loads(pickled)

        def ask(process: str, question: Any) -> Any:
            manager: Any = _Manager(str(folder / process))
            manager.connect()
            return pickle.loads(manager.served().call("answer", pickle.dumps((question,))))

        place = TransportPlace(run=setup.run, process=name, device="cpu", ask=ask, address=setup.address)
        build: Callable[..., Transport] = Catalog.of({}).resolve(setup.build)
        self.transport = build(setup.config, place=place)
        return os.getpid()

    def call(self, method: str, args: bytes) -> bytes:
        if method == "address":
            return pickle.dumps(self.transport.address)
        if method in ("answer", "counts"):
            return pickle.dumps(getattr(self.transport, method)(*pickle.loads(args)))
        with self.one_at_a_time:
            return pickle.dumps(getattr(self.transport, method)(*pickle.loads(args)))


_served = _Served()


def _get_served() -> _Served:
    return _served


class _Manager(BaseManager): ...


_Manager.register("served", _get_served, exposed=("build", "call"))


def _set_up(mark: str) -> None:
    # A separate process group, so that everything it starts can be killed.
    os.setsid()
    os.environ[MARK] = mark
