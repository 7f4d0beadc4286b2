"""Transports in processes of their own.

The processes of a run find each other by sockets in a folder. Calls on a transport come one at a time; what another
process asks it is answered meanwhile, as the role says.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Transport, TransportPlace
from unirl.core.specs.config import PartConfig

from .forks import Fork
from .processes import MARK

__all__ = ["Setup", "TransportProcess"]

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
    """The transport of one process of a run, called from this one; a context that ends the process for certain."""

    def __init__(self, name: str, setup: Setup, *, folder: Path, mark: str) -> None:
        """Start the process and have it build its transport.

        folder: of the run, with a short path: sockets lie in it.  mark: see `.processes.marked`.
        Raises AssertionError with what it printed when it does not come up.
        """
        self.name, self._folder = name, folder
        log = folder / f"{name}.log"
        self._fork = Fork(_serve, folder, name, setup, log=log, environment={MARK: mark})
        end = time.monotonic() + START_S
        try:
            while not (folder / name).exists():
                is_over = self._fork.wait(POLL_S) is not None or time.monotonic() > end
                self._fork.check(f"the transport of process {name!r} did not start; the process")
                assert not is_over, f"the transport of process {name!r} did not start: {self._fork.tail()}"
        except BaseException:
            self._fork.kill()
            raise

    def __call__(self, method: str, *args: Any) -> Any:
        """What the transport's method gives, or raises."""
        return _call(self._folder, self.name, method, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # One that cannot say goodbye any more is ended below.
        with suppress(OSError, EOFError, AssertionError):
            self("end")
        self._fork.wait(END_S)
        self._fork.kill()


def _call(folder: Path, name: str, method: str, *args: Any) -> Any:
    with Client(str(folder / name), "AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((method, args)))
        if not connection.poll(CALL_S):
            raise AssertionError(f"process {name!r} did not answer {method!r} within {CALL_S:g} s")
        is_good, value = pickle.loads(connection.recv_bytes())
    if not is_good:
        raise value
    return value


def _serve(folder: Path, name: str, setup: Setup) -> None:
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
