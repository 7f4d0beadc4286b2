"""TCP addresses that the children of this process listen on, from the kernel's tables."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

__all__ = ["Listening"]

Address = IPv4Address | IPv6Address

LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp, see proc(5)."""
ROW_BYTES = 100
POLL_S = 0.02


class Listening:
    """Addresses that were listened on while `watched`, by children that came after this object."""

    def __init__(self) -> None:
        self.addresses: set[Address] = set()
        # The cluster of the tests of this process, for one.
        self._others = frozenset(_descendants(os.getpid()))

    @contextmanager
    def watched(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            before: Set[str] = frozenset()
            while not stop.wait(POLL_S):
                sockets = _listening_sockets()
                # Looking for those who hold them takes much longer, from a start on few cores.
                if sockets.keys() - before:
                    self.addresses |= _held_by(_descendants(os.getpid(), self._others), sockets)
                before = sockets.keys()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def beyond_loopback(self) -> list[str]:
        return sorted(str(address) for address in self.addresses if not _plain(address).is_loopback)


def _listening_sockets() -> dict[str, Address]:
    """Addresses of this machine's listening sockets, by the sockets' names in /proc/PID/fd."""
    result: dict[str, Address] = {}
    for table in ("tcp", "tcp6"):
        for words in _listening_rows(Path("/proc/net", table)):
            result[f"socket:[{words[9]}]"] = _address(words[1].partition(":")[0])
    return result


def _listening_rows(table: Path) -> Iterator[list[str]]:
    """The rows that a table begins with, see the kernel's Documentation/networking/proc_net_tcp.rst.

    Less than a row is read at a time: to write out the others, of which there may be none, the kernel takes
    milliseconds.
    """
    rest = ""
    with table.open("rb", buffering=0) as file:
        while part := file.read(ROW_BYTES):
            *lines, rest = (rest + part.decode()).split("\n")
            for words in (line.split() for line in lines):
                if words[0] == "sl":
                    continue
                if words[3] != LISTEN:
                    return
                yield words


def _held_by(pids: Iterable[int], sockets: Mapping[str, Address]) -> set[Address]:
    result: set[Address] = set()
    for pid in pids:
        # A process may end, and a file be closed, while this is read.
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    link = str(file.readlink())
                    if link in sockets:
                        result.add(sockets[link])
    return result


def _address(digits: str) -> Address:
    """The kernel prints an address as words of 32 bits in the machine's byte order."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    return ip_address(b"".join(words))


def _plain(address: Address) -> Address:
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
