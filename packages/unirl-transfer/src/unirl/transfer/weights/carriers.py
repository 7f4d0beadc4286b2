"""Transports for the bytes of a bucket between processes, all below the same transfer protocol."""

from __future__ import annotations

import os
import secrets
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from unirl.core.errors import RunFailed

from .group import WeightGroup

__all__ = [
    "ByValueCarrier",
    "Carrier",
    "CollectiveCarrier",
    "CudaIpcCarrier",
    "DiskCarrier",
    "InProcessCarrier",
    "SharedMemoryCarrier",
    "Ticket",
]

Ticket = Any
"""Handle by which the receiver gets the bytes: small, and picklable for carriers between processes."""


class Carrier(Protocol):
    """Moves one flat uint8 tensor. Sender and receiver each have one, configured alike."""

    def send(self, data: Tensor) -> Ticket: ...
    def receive(self, ticket: Ticket) -> Tensor:
        """[bytes] uint8, on the receiver's device. Valid until the sender releases the ticket."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Called on the sender once the receiver is done or has failed: free the ticket's resources."""
        ...


class InProcessCarrier:
    """Carrier between parts of one process: the ticket is the tensor."""

    def send(self, data: Tensor) -> Ticket:
        return data

    def receive(self, ticket: Ticket) -> Tensor:
        return ticket

    def release(self, ticket: Ticket) -> None:
        pass


class ByValueCarrier:
    """Carrier by value in calls, between any two processes that can call each other: the ticket is the bytes.

    Under Ray, large arguments of a call go through its object store.
    """

    def send(self, data: Tensor) -> Ticket:
        return data.cpu()

    def receive(self, ticket: Ticket) -> Tensor:
        return ticket

    def release(self, ticket: Ticket) -> None:
        pass


class SharedMemoryCarrier:
    """Shared memory between processes of one machine. One block per bucket, freed when the ticket is released."""

    def __init__(self) -> None:
        self._blocks: dict[str, SharedMemory] = {}

    def send(self, data: Tensor) -> Ticket:
        """Raises RunFailed when shared memory is full."""
        block = SharedMemory(create=True, size=max(1, data.numel()), name=f"unirl-{os.getpid()}-{secrets.token_hex(6)}")
        if sys.platform == "linux":
            try:
                # A new block has no pages yet, and writing to one that does not fit would kill this process by SIGBUS.
                os.posix_fallocate(block._fd, 0, block.size)  # type: ignore[attr-defined]
            except OSError as error:
                block.close()
                block.unlink()
                raise RunFailed(
                    f"launcher.carrier: got 'shared-memory', but /dev/shm has no space for a bucket of "
                    f"{block.size / 2**20:.0f} MiB ({error.strerror}). Give the container more shared memory, such as "
                    "`docker run --shm-size=16g`, lower launcher.bucket_mb, or use launcher.carrier=ray."
                ) from error
        torch.frombuffer(block.buf, dtype=torch.uint8, count=data.numel()).copy_(data)
        self._blocks[block.name] = block
        return (block.name, data.numel())

    def receive(self, ticket: Ticket) -> Tensor:
        name, size = ticket
        block = SharedMemory(name=name)
        if name not in self._blocks:
            # Python 3.11 and 3.12 count an attached block as this process's own and would remove it a second time.
            resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
        try:
            return torch.frombuffer(block.buf, dtype=torch.uint8, count=size).clone()
        finally:
            block.close()

    def release(self, ticket: Ticket) -> None:
        block = self._blocks.pop(ticket[0], None)
        if block is not None:
            block.close()
            block.unlink()


class CudaIpcCarrier:
    """CUDA IPC between processes on one GPU: the receiver maps the sender's memory, without an intermediate copy."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def send(self, data: Tensor) -> Ticket:
        """Weights exported to the CPU are first moved to this process's current device."""
        data = data.cuda()
        _, arguments = reduce_tensor(data)
        # The sender's tensor must live until the receiver has taken its copy.
        key = data.data_ptr()
        self._kept[key] = data
        return (key, arguments)

    def receive(self, ticket: Ticket) -> Tensor:
        return rebuild_cuda_tensor(*ticket[1])

    def release(self, ticket: Ticket) -> None:
        self._kept.pop(ticket[0], None)


class CollectiveCarrier:
    """Broadcast in a process group to all receivers at once: they call `receive` while the sender waits."""

    def __init__(self, group: WeightGroup | None = None) -> None:
        self.group = group
        """Group of the sender and all receivers; re-formed when one of them is replaced."""
        self._pending: dict[int, tuple[Work, Tensor]] = {}
        self._count = 0

    def send(self, data: Tensor) -> Ticket:
        """Starts the broadcast; `release` waits for its end."""
        group = self._joined()
        data = data.to(group.device)
        self._count += 1
        # The tensor must live until it has been sent.
        self._pending[self._count] = (group.start(data), data)
        return (self._count, data.numel())

    def receive(self, ticket: Ticket) -> Tensor:
        group = self._joined()
        data = torch.empty(ticket[1], dtype=torch.uint8, device=group.device)
        group.wait(group.start(data))
        return data

    def release(self, ticket: Ticket) -> None:
        """Wait until it is sent; nothing to wait for after leaving the group."""
        work, _ = self._pending.pop(ticket[0])
        if not self._joined().is_left:
            self._joined().wait(work)

    def leave(self) -> None:
        """Leave the group, if any."""
        if self.group is not None:
            self.group.leave()

    def _joined(self) -> WeightGroup:
        assert self.group is not None, "no group was joined"
        return self.group


class DiskCarrier:
    """Through a shared folder, one safetensors file per bucket, deleted when the ticket is released."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, data: Tensor) -> Ticket:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"bucket-{secrets.token_hex(8)}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file({"bytes": data.cpu()}, partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        return str(path)

    def receive(self, ticket: Ticket) -> Tensor:
        return load_file(ticket)["bytes"]

    def release(self, ticket: Ticket) -> None:
        Path(ticket).unlink(missing_ok=True)
