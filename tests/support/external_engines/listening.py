"""Which TCP addresses the children of this process listen on, from the kernel's tables."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

__all__ = ["Listening"]

Address = IPv4Address | IPv6Address

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, NLMSG_DONE, TCP_LISTEN = 4, 20, 0x301, 3, 10
HEADER = struct.Struct("=IHHII")
SOURCE_AT, INODE_AT = 8, 68
"""Constants, `nlmsghdr` and places in `inet_diag_msg`, from linux/netlink.h, sock_diag.h, inet_diag.h and tcp_states.h.
Lengths of these messages are multiples of four."""
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
    """Of this machine, by their names in /proc/PID/fd, see sock_diag(7).

    The kernel takes milliseconds to write /proc/net/tcp, which has all connections.
    """
    result: dict[str, Address] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as diag:
        for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 0, 1 << TCP_LISTEN)
            diag.send(HEADER.pack(HEADER.size + len(asked), SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, 1, 0) + asked)
            while True:
                data, at, kind = diag.recv(1 << 16), 0, SOCK_DIAG_BY_FAMILY
                while at < len(data) and kind == SOCK_DIAG_BY_FAMILY:
                    length, kind, *_ = HEADER.unpack_from(data, at)
                    if kind == SOCK_DIAG_BY_FAMILY:
                        message = data[at + HEADER.size : at + length]
                        (inode,) = struct.unpack_from("=I", message, INODE_AT)
                        result[f"socket:[{inode}]"] = ip_address(message[SOURCE_AT : SOURCE_AT + size])
                    at += length
                if kind != SOCK_DIAG_BY_FAMILY:
                    assert kind == NLMSG_DONE, "the kernel does not list its sockets"
                    break
    return result


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
