"""Which TCP addresses the children of this process listen on, from the kernel's tables."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

__all__ = ["Listening", "listening_addresses"]

LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp, see proc(5)."""
POLL_S = 0.02


class Listening:
    """Addresses that were listened on while `watched`, by children that came after this object."""

    def __init__(self) -> None:
        self.addresses: set[IPv4Address | IPv6Address] = set()
        # The cluster of the tests of this process, for one.
        self._others = frozenset(_descendants(os.getpid()))

    @contextmanager
    def watched(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(POLL_S):
                self.addresses |= listening_addresses(os.getpid(), without=self._others)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def beyond_loopback(self) -> list[str]:
        return sorted(str(address) for address in self.addresses if not _plain(address).is_loopback)


def listening_addresses(root: int, *, without: Set[int] = frozenset()) -> set[IPv4Address | IPv6Address]:
    """Of the TCP sockets that the descendants of this process hold, but for some of them and their descendants."""
    by_inode: dict[str, IPv4Address | IPv6Address] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                by_inode[f"socket:[{words[9]}]"] = _address(words[1].partition(":")[0])
    result: set[IPv4Address | IPv6Address] = set()
    for pid in _descendants(root, without):
        # A process may end, and a file be closed, while this is read.
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    link = str(file.readlink())
                    if link in by_inode:
                        result.add(by_inode[link])
    return result


def _address(digits: str) -> IPv4Address | IPv6Address:
    """The kernel prints an address as words of 32 bits in the machine's byte order."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    return ip_address(b"".join(words))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _descendants(root: int, without: Set[int] = frozenset()) -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program may contain spaces and parentheses.
            pid, rest = int(file.parent.name), file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(rest[1]), []).append(pid)
    result: list[int] = []
    open_pids = [*children.get(root, [])]
    while open_pids:
        pid = open_pids.pop()
        if pid in without:
            continue
        result.append(pid)
        open_pids += children.get(pid, [])
    return result
