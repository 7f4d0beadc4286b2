"""A tracking library in a separate process: a run hands over calls and never waits for the library or its server."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from unirl.core.errors import UniRLError

from .client_main import without_secrets

__all__ = ["ClientProcess", "TrackerFailed"]

EXIT_S = 5.0
"""Longest wait for a process that has nothing left to do."""


class TrackerFailed(UniRLError):
    """A tracking library, or its server, could not be used."""


class ClientProcess:
    """Calls of the methods of one object in another process, in order.

    A separate process also keeps apart what libraries have once for each process: a current run, a folder, settings.
    When the run's process ends, however it ends, the other one calls `finish("failed")` and ends too.
    """

    def __init__(
        self,
        client: str,
        settings: object,
        *,
        log: Path,
        variables: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        """client: `module:Class`, built from `settings` over there, which are pickled.
        log: file to which that process prints.
        variables: defaults of its environment; what is set already wins.
        secrets: variables whose values are removed from messages.
        """
        self._log = log
        self._secrets = [value for name in secrets if (value := os.environ.get(name))]
        self._number = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        self._connection, other = Pipe()
        with other, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unirl.tracker_host.client_main", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(other.fileno(),),
                env={**(variables or {}), **os.environ},
                # An interrupt at the keyboard is for the run, which then ends this process.
                start_new_session=True,
            )
        self._send((client, settings, self._secrets))

    def send(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Hand over a call and do not wait for it. Raises TrackerFailed, once, if an earlier one failed."""
        while self._connection.poll():
            self._receive()
        self._send((0, method, arguments, keywords))

    def call(self, method: str, *arguments: Any, timeout_s: float, **keywords: Any) -> Any:
        """The result of a call, after all that were handed over before. Raises TrackerFailed if one of them fails, and
        when it takes longer than `timeout_s`; the process has ended then."""
        self._number += 1
        self._send((self._number, method, arguments, keywords))
        until = time.monotonic() + timeout_s
        while self._connection.poll(max(0.0, until - time.monotonic())):
            number, result = self._receive()
            if number == self._number:
                return result
        raise self._failed(f"no answer within {timeout_s:g} s")

    def close(self) -> None:
        """End the process, with whatever it has not done yet. May be called twice."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Let the process end after `finish`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_S)
        self.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError as error:
            # It may have said why.
            while self._has_reply():
                self._receive()
            raise self._failed("its process has ended") from error

    def _has_reply(self) -> bool:
        try:
            return self._connection.poll()
        except OSError:
            return False

    def _receive(self) -> tuple[int, Any]:
        """Number and result of a call. Raises TrackerFailed for one that failed."""
        try:
            number, reply = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failed("its process has ended") from error
        if "error" in reply:
            raise self._failed(reply["error"])
        return number, reply["result"]

    def _failed(self, text: str) -> TrackerFailed:
        self.close()
        return TrackerFailed(f"{without_secrets(text, self._secrets).rstrip('.')}. {self._log} has what it printed.")
