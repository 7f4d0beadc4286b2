"""Transports in processes of their own.

The processes of a run find each other by sockets in a folder. Calls on a transport come one at a time; what another
process asks it is answered meanwhile, as the role says.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from unirl.core.catalog import Catalog
from unirl.core.config import PartConfig
from unirl.core.errors import UniRLError
from unirl.core.roles import Transport, TransportPlace

from .forks import Forks

__all__ = ["Setup", "TransportProcess", "TransportProcesses"]

START_S = 240.0
"""Nearly all of it is what the transport imports and starts: seconds on idle cores, many times that on busy ones."""
CALL_S = 120.0
END_S = 30.0
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a process builds. Plain data."""

    build: str
    config: PartConfig
    run: str
    address: Any = None
    """Of the driver's transport; None in the driver."""


class TransportProcess:
    """The transport of one process of a run, called from this one."""

    def __init__(self, name: str, *, folder: Path) -> None:
        self.name, self._folder = name, folder

    def __call__(self, method: str, *args: Any) -> Any:
        """What the transport's method gives, or raises."""
        return _call(self._folder, self.name, method, *args)


class TransportProcesses:
    """The processes of a run; a context that ends them for certain."""

    def __init__(self, names: Sequence[str], *, folder: Path, mark: str, forks: Forks) -> None:
        """folder: empty, with a short path: sockets lie in it.  mark: see `.processes.marked`."""
        self._names, self._folder = names, folder
        self._log = folder / "log"
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._parent = forks.start(_serve_all, folder, tuple(names), log=self._log, mark=mark, environment=path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            # One that cannot say goodbye any more is ended below.
            with suppress(OSError, EOFError, AssertionError):
                _call(self._folder, name, "end")
        self._parent.wait(END_S)
        self._parent.kill()

    def start(self, name: str, setup: Setup) -> TransportProcess:
        """Have a process build its transport. Raises AssertionError with what it printed when it does not come up."""
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(pickle.dumps(setup))
        partial.rename(self._folder / f"{name}.setup")
        end = time.monotonic() + START_S
        while not (self._folder / name).exists():
            failed = (self._folder / f"{name}.failed").exists() or self._parent.poll() is not None
            if failed or time.monotonic() > end:
                said = self._log.read_text(errors="replace")
                raise AssertionError(f"the transport of process {name!r} did not start: {said[-2000:]}")
            time.sleep(POLL_S)
        return TransportProcess(name, folder=self._folder)


def _call(folder: Path, name: str, method: str, *args: Any) -> Any:
    with Client(str(folder / name), "AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((method, args)))
        if not connection.poll(CALL_S):
            raise AssertionError(f"process {name!r} did not answer {method!r} within {CALL_S:g} s")
        is_good, value = pickle.loads(connection.recv_bytes())
    if not is_good:
        raise value
    return value


def _serve(folder: Path, name: str) -> None:
    while not (folder / f"{name}.setup").exists():
        time.sleep(POLL_S)
    setup: Setup = pickle.loads((folder / f"{name}.setup").read_bytes())
    build: Callable[..., Transport] = Catalog.of({}).resolve(setup.build)
    transport = build(
        setup.config,
        place=TransportPlace(
            run=setup.run,
            process=name,
            device="cpu",
            ask=lambda process, question: _call(folder, process, "answer", question),
            address=setup.address,
        ),
    )
    ended, one_at_a_time = threading.Event(), threading.Lock()

    def reply(connection: Connection[Any, Any]) -> None:
        with connection:
            method, args = pickle.loads(connection.recv_bytes())
            try:
                if method == "end":
                    value = None
                elif method == "address":
                    value = transport.address
                elif method in ("answer", "counts"):
                    value = getattr(transport, method)(*args)
                else:
                    with one_at_a_time:
                        value = getattr(transport, method)(*args)
                answer = pickle.dumps((True, value))
            except UniRLError as error:
                answer = pickle.dumps((False, error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the claim that asked is told
                answer = pickle.dumps((False, AssertionError(f"{method} raises {type(error).__name__}: {error}")))
            connection.send_bytes(answer)
            if method == "end":
                ended.set()

    # Under another name first: the socket is there once it is listened to.
    with Listener(str(folder / f"{name}.new"), "AF_UNIX", backlog=16) as listener:
        os.link(folder / f"{name}.new", folder / name)

        def listen() -> None:
            while True:
                threading.Thread(target=reply, args=(listener.accept(),), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        ended.wait()
    transport.close()


def _serve_all(folder: Path, names: Sequence[str]) -> None:
    children: list[int] = []
    for name in names:
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            _serve(folder, name)
            code = 0
        except BaseException:
            traceback.print_exc()
            (folder / f"{name}.failed").touch()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    for child in children:
        os.waitpid(child, 0)
