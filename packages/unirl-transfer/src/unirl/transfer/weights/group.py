"""A dedicated process group for weights, independent of any other groups of its processes."""

from __future__ import annotations

import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore, Work
from unirl.core.errors import RunFailed

__all__ = ["Address", "WeightGroup", "interface_of", "listen", "reach"]

Address = tuple[str, int]
"""Host and port of a group's rendezvous."""

LOOK_EVERY_S = 2e-4
"""Polling interval during a broadcast. A bucket takes milliseconds; a poll costs microseconds."""


def listen(host: str, world: int, *, timeout_s: float) -> tuple[TCPStore, Address]:
    """Rank 0: open the rendezvous store on a free port of this machine. host: its address as the others reach it, which
    its own name often does not give (127.0.1.1 on Debian)."""
    within = timedelta(seconds=timeout_s)
    store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=within)
    return store, (host, store.port)


def reach(address: Address, world: int, *, timeout_s: float) -> TCPStore:
    """Other ranks: connect to rank 0's store."""
    return TCPStore(address[0], address[1], world, is_master=False, timeout=timedelta(seconds=timeout_s))


def interface_of(host: str) -> str:
    """Name of this machine's network interface with an IPv4 address; empty if none has it, or it cannot be asked."""
    try:
        import fcntl
    except ImportError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR of Linux.
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # It has no address.
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return ""


class WeightGroup:
    """Broadcasts from rank 0: gloo for ranks on CPUs, NCCL when each rank has its own GPU.

    Independent of torch's default group, which the train ranks use, so that it can be re-formed whenever a process is
    replaced.
    """

    def __init__(self, store: Store, *, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        """Returns when every rank has joined.  timeout_s: of a broadcast.

        Raises RunFailed when one does not join within the store's timeout.
        """
        self.device, self.world = device, world
        self._timeout_s = timeout_s
        self._store = store  # it must live as long as the group
        self._left = threading.Event()
        try:
            self._group: Any = _backend(store, rank, world, device, timeout_s)
        except RuntimeError as error:
            raise RunFailed(
                f"weights: rank {rank} could not reach the others of a group of {world}: {error}. They are dead or "
                "hung, or a firewall blocks the ports between their machines and this one; or raise "
                "launcher.start_timeout_s."
            ) from error

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def start(self, data: Tensor) -> Work:
        """Start broadcasting rank 0's data into every rank's tensor, which must live until `wait` returns."""
        group = self._group
        if group is None:
            raise RunFailed(f"weights: cannot send a bucket: this rank has left its group of {self.world}.")
        return group.broadcast(data, 0)

    def wait(self, work: Work) -> None:
        """Wait for the broadcast to finish.

        Raises RunFailed when it takes longer than `timeout_s`, when a rank is gone, or when this one leaves.
        """
        end = time.monotonic() + self._timeout_s
        # Not `Work.wait`: gloo's cannot be aborted from another thread, and NCCL's does not wait for the data.
        while not work.is_completed():
            if self.is_left:
                raise RunFailed("weights: this rank left the group while a bucket was in flight.")
            if time.monotonic() > end:
                raise RunFailed(
                    f"weights: a bucket did not reach all {self.world} ranks of the group within "
                    f"{self._timeout_s:g} s. A rank is hung, or launcher.call_timeout_s is too short."
                )
            time.sleep(LOOK_EVERY_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise RunFailed(f"weights: a rank of the group of {self.world} is gone: {error}") from error

    def leave(self) -> None:
        """Abort pending waits, in any thread, and leave the group. Idempotent and thread-safe."""
        if not self._left.is_set():
            self._left.set()
            # gloo's destructor waits up to its timeout for a broadcast in flight, so it runs in a background
            # thread.
            threading.Thread(target=self._end, name="weight-group-end", daemon=True).start()

    def _end(self) -> None:
        group, self._group = self._group, None
        group.abort()
        del group


def _backend(store: Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    """A c10d `Backend`, whose type stub lacks the methods used here."""
    if device.type == "cpu":
        from torch._C._distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # After its own timeout NCCL's watchdog kills the process; `wait` fails earlier, with the reason.
    options._timeout = timedelta(seconds=2 * timeout_s)
    group: Any = ProcessGroupNCCL(store, rank, world, options)
    # The first collective creates the communicator; failing to create it should be a start-up error.
    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
    return group
