"""Whether a cluster answers at an address, before Ray tries to join it for minutes."""

from __future__ import annotations

import os
import socket

__all__ = ["check_answers"]

ANSWERS_WITHIN_S = 10.0
"""A head node accepts a connection in milliseconds, even while busy."""


def check_answers(address: str) -> None:
    """Raises ConnectionError where nothing listens at the address of a cluster: `host:port`, or `auto`.

    `auto` is resolved as Ray does: RAY_ADDRESS, a cluster that runs on this machine, or the address that the last one
    wrote to a file, which a killed cluster leaves behind. Other addresses (`local`, `ray://host:port`) are not checked.
    """
    source = ""
    if address == "auto":
        from ray._common.utils import get_ray_address_file
        from ray._private import services

        source = " (RAY_ADDRESS)"
        if not (address := os.environ.get("RAY_ADDRESS", "")):
            address = services.get_ray_address_from_environment("auto", None)
            # A cluster that runs answers, so this one is from the file.
            source = f" (left by an earlier cluster in {get_ray_address_file(None)}, which may be removed)"
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise ConnectionError(f"{address}{source}: {error.strerror or error}") from error
