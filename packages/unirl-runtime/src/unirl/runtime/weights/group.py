"""A process group for weights alone, beside whatever other groups its processes are in."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore, Work
from unirl.core.errors import RunFailed

__all__ = ["Address", "WeightGroup", "listen", "reach"]

Address = tuple[str, int]
"""Host and port where the ranks of a group find each other."""

LOOK_EVERY_S = 2e-4
"""Between two looks at a broadcast. One of a bucket takes milliseconds, and a look costs microseconds."""


def listen(world: int, *, timeout_s: float) -> tuple[TCPStore, Address]:
    """Rank 0: a port of this machine that is free, where the others come to."""
    host = socket.gethostbyname(socket.gethostname())
    within = timedelta(seconds=timeout_s)
    store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=within)
    return store, (host, store.port)


def reach(address: Address, world: int, *, timeout_s: float) -> TCPStore:
    """The other ranks: the store of rank 0."""
    return TCPStore(address[0], address[1], world, is_master=False, timeout=timedelta(seconds=timeout_s))


class WeightGroup:
    """Broadcasts from rank 0: by gloo where the ranks are on CPUs, by NCCL where each has a GPU of its own.

    Not torch's default group, which the train ranks have among them, nor known to it: a group of the same processes may
    be formed again, as often as one of them is replaced.
    """

    def __init__(self, store: Store, *, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        """Returns when every rank has come.  timeout_s: of a broadcast.

        Raises RunFailed when one does not come in the time of the store.
        """
        self.device, self.world = device, world
        self._timeout_s = timeout_s
        self._store = store  # it must live as long as the group
        self._left = threading.Event()
        try:
            self._group: Any = _backend(store, rank, world, device, timeout_s)
        except RuntimeError as error:
            raise RunFailed(
                f"weights: rank {rank} does not find the other ones of a group of {world}: {error}. They are "
                "elsewhere, or hang, or no free port of their machines is open to this one; or raise "
                "launcher.start_timeout_s."
            ) from error

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def start(self, data: Tensor) -> Work:
        """Begin a broadcast of rank 0's numbers into everybody's tensor. It must live until `wait` has returned."""
        group = self._group
        if group is None:
            raise RunFailed(f"weights: a bucket was to go through a group of {self.world} that was left.")
        return group.broadcast(data, 0)

    def wait(self, work: Work) -> None:
        """Until the broadcast is done.

        Raises RunFailed when it takes longer than `timeout_s`, when a rank is gone, or when this one leaves.
        """
        end = time.monotonic() + self._timeout_s
        # Not `Work.wait`: gloo has no way to end it from another thread, and NCCL's does not wait for the numbers.
        while not work.is_completed():
            if self.is_left:
                raise RunFailed("weights: the group was left while a bucket was on its way.")
            if time.monotonic() > end:
                raise RunFailed(
                    f"weights: a bucket did not come to all {self.world} ranks of the group within "
                    f"{self._timeout_s:g} s. A rank hangs, or launcher.call_timeout_s is too short."
                )
            time.sleep(LOOK_EVERY_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise RunFailed(f"weights: a rank of the group of {self.world} is gone: {error}") from error

    def leave(self) -> None:
        """End what waits, in whichever thread, and take no further part. May be called twice, and from any thread."""
        if not self._left.is_set():
            self._left.set()
            # gloo's destructor waits for a broadcast that is on its way, for up to its timeout: not in a thread that
            # has work to do.
            threading.Thread(target=self._end, name="weight-group-end", daemon=True).start()

    def _end(self) -> None:
        group, self._group = self._group, None
        group.abort()
        del group


def _backend(store: Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    """A c10d `Backend`, whose type says nothing of the calls that it has."""
    if device.type == "cpu":
        from torch._C._distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # Past its own timeout NCCL's watchdog ends the process; `wait` is first, and says why.
    options._timeout = timedelta(seconds=2 * timeout_s)
    group: Any = ProcessGroupNCCL(store, rank, world, options)
    # Communicators are made by the first collective; one that cannot be made is an error of the start.
    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
    return group
