"""Whether a cluster answers at an address, before Ray tries to join it for minutes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["check_answers"]

ANSWERS_WITHIN_S = 10.0
"""A head node accepts a connection in milliseconds, even while busy."""


def check_answers(address: str) -> None:
    """Raises ConnectionError where nothing listens at the address of a cluster: `host:port`, or `auto`.

    `auto` is RAY_ADDRESS, else what the file says that the last cluster of this machine wrote; one that was killed
    leaves it behind. Other addresses (`local`, `ray://host:port`) are Ray's to check.
    """
    source = ""
    if address == "auto":
        address, source = os.environ.get("RAY_ADDRESS", ""), " (RAY_ADDRESS)"
        path = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster"
        if not address and path.is_file():
            address, source = path.read_text().strip(), f" (left by an earlier cluster in {path}, which may be removed)"
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise ConnectionError(f"{address}{source}: {error.strerror or error}") from error
