"""A Mooncake master for one run: started on the driver's machine, and ended with the driver however it ends."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from unirl.core.errors import PlanRejected, RunFailed

__all__ = ["MooncakeMaster", "check_installed"]

_GUARD = """
exec 3<&0
"$@" </dev/null 3<&- & child=$!
{ read -r _ <&3; kill "$child"; } & watch=$!
wait "$child"; code=$?
kill "$watch"
exit $code
"""
"""Runs a command until it ends, or until standard input does: when the process that holds its other end dies."""


def check_installed() -> str:
    """Path of Mooncake's master program. Raises PlanRejected when Mooncake is missing or does not load."""
    try:
        import mooncake.store  # noqa: F401  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise PlanRejected(
            f"transport.storage: got 'mooncake', but it cannot be imported: {error}. Install the build for this "
            "machine, `pip install unirl-transport-transfer-queue[mooncake-cpu]` (or mooncake-cuda12, "
            "mooncake-cuda13), and the system's libibverbs1."
        ) from error
    beside = Path(sys.executable).parent / "mooncake_master"
    result = str(beside) if beside.is_file() else shutil.which("mooncake_master")
    if result is None:
        raise PlanRejected("transport.storage: got 'mooncake', but its program mooncake_master is not on PATH.")
    return result


class MooncakeMaster:
    """The process that knows where the objects of a store lie."""

    def __init__(self, program: str, *, host: str, timeout_s: float) -> None:
        """Starts it on a free port of `host`. Raises RunFailed, with what it wrote, when it does not come up."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        port, metrics_port = _free_ports(host, 2)
        self.address = f"{host}:{port}"
        self._guard = subprocess.Popen(
            [
                *("/bin/sh", "-c", _GUARD, "sh", program, f"--rpc_address={host}", f"--rpc_port={port}"),
                # No eviction: stored rows must stay until drop() removes them.
                *("--eviction_high_watermark_ratio=1.0", "--eviction_ratio=0.0"),
                *(f"--metrics_port={metrics_port}", "--enable_metric_reporting=false"),
            ],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + timeout_s
        while not _answers(host, port):
            if self._guard.poll() is not None or time.monotonic() > end:
                wrote = self._wrote()
                self.stop()
                raise RunFailed(
                    f"transport: {program} did not answer at {self.address} within {timeout_s:g} s: {wrote}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """May be called twice."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        self._guard.wait(30)
        self._log.close()

    def _wrote(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace").strip() or "it wrote nothing."


def _free_ports(host: str, count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((host, 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
