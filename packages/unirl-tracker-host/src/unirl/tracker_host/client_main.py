"""The process of a tracking library, started by `client_process`: takes calls in order, reports one that fails."""

from __future__ import annotations

import os
import pickle
import queue
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from unirl.core.errors import UniRLError

__all__ = ["MOST_WAITING_BYTES", "main", "without_secrets"]

MOST_WAITING_BYTES = 2**28
"""Calls that may wait here, in bytes, for a library or its server that is slow."""
ENDING_S = 30.0
"""Longest time that this process works on after a run that ended without saying so, such as one that was killed."""


def main() -> None:
    # A scheduler signals every process of a job, and a run that stops still has something to log.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    calls = _Calls(Connection(int(sys.argv[1])))
    client, method, number = None, "its import", 0
    try:
        target, settings, calls.secrets = calls.connection.recv()
        module, _, name = target.partition(":")
        client = getattr(import_module(module), name)(settings)
        threading.Thread(target=calls.receive, daemon=True).start()
        while method != "finish":
            number, method, arguments, keywords = calls.next()
            result = getattr(client, method)(*arguments, **keywords)
            if number:
                calls.reply(number, result=result)
    except Exception as error:  # noqa: BLE001 - the run gets it
        print(without_secrets(traceback.format_exc(), calls.secrets), file=sys.stderr, flush=True)
        text = str(error) if isinstance(error, UniRLError) else f"{type(error).__name__}: {error}"
        text = without_secrets(text, calls.secrets)
        calls.reply(number, error=text)
        if client is not None and method not in ("start", "finish"):
            calls.end_soon()
            client.finish("failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Hooks of libraries at the exit may wait for servers that do not answer.
        os._exit(0)


class _Calls:
    """Calls that have arrived, in order: read at once, so that the run never waits to hand one over."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.secrets: Sequence[str] = ()
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bytes = 0

    def receive(self) -> None:
        is_full = False
        while True:
            try:
                call = self.connection.recv_bytes()
            except (EOFError, OSError):
                self._waiting.put(None)
                self.end_soon()
                return
            with self._lock:
                self._bytes += len(call)
                is_late = self._bytes > MOST_WAITING_BYTES
            if is_late and not is_full:
                is_full = True
                self.reply(0, error=f"it is too slow: more than {MOST_WAITING_BYTES >> 20} MiB wait to be logged")
            if is_full:
                # Read on, or the run would wait: what is read has no use any more.
                continue
            self._waiting.put(call)

    def next(self) -> tuple[int, str, tuple[Any, ...], dict[str, Any]]:
        """The next call; `finish("failed")` when the run is gone."""
        call = self._waiting.get()
        if call is None:
            return 0, "finish", ("failed",), {}
        with self._lock:
            self._bytes -= len(call)
        return pickle.loads(call)

    def reply(self, number: int, **result: Any) -> None:
        try:
            self.connection.send((number, result))
        except OSError:
            # The run is gone.
            return

    def end_soon(self) -> None:
        timer = threading.Timer(ENDING_S, os._exit, (1,))
        timer.daemon = True
        timer.start()


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """The text without these words, and without user and password of its URLs."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return re.sub(r"(\w[\w+.-]*://)[^/\s@]+@", r"\1***@", text)


if __name__ == "__main__":
    main()
