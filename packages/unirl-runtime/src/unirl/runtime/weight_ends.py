"""Both ends of a weight transfer on a worker: send its exported weights, or receive an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from unirl.core.errors import EchoMismatch
from unirl.core.loop.parts import Parts
from unirl.core.roles import Policy, WeightReceipt, WeightUpdate

from .weights.carriers import (
    ByValueCarrier,
    Carrier,
    CollectiveCarrier,
    CudaIpcCarrier,
    DiskCarrier,
    SharedMemoryCarrier,
)
from .weights.group import Address, WeightGroup, listen, reach
from .weights.manifest import Manifest
from .weights.transfer import Receiver, TransferReport, send
from .wire import packed, unpacked

__all__ = ["Shipped", "Tell", "WeightEnds"]

Tell = Callable[[Sequence[str], str, bytes], list[bytes]]
"""Call the named workers concurrently: a method and its packed arguments; returns packed answers in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipped:
    """One transfer of weights."""

    report: TransferReport
    """The report of each receiver."""
    announced_bytes: int
    """Bytes sent to all receivers besides the tensors: names, shapes, checksums and tickets."""


class WeightEnds:
    """Sends and receives the weights of one worker; others call its methods as `weights.<name>`."""

    def __init__(self, name: str, *, parts: Parts, tell: Tell, device: torch.device, shares_module: bool) -> None:
        """name: of the worker.  shares_module: its engine samples with the module that trains, and has no weights."""
        self._name, self._parts, self._tell, self._device = name, parts, tell, device
        self._shares_module = shares_module
        self._export: WeightUpdate | None = None
        self._receiver: Receiver | None = None
        self._collective = CollectiveCarrier()
        self._rendezvous: Store | None = None

    # The group of the carrier `collective`: the sender, its rank 0, and the receivers.

    def open_group(self, world: int, *, within_s: float) -> Address:
        """Rank 0: open the TCPStore for the rendezvous."""
        self._collective.leave()
        self._rendezvous, address = listen(world, timeout_s=within_s)
        return address

    def join_group(self, address: Address, *, rank: int, world: int, timeout_s: float, within_s: float) -> None:
        """Collective. Leaves the worker's current group, if any.

        timeout_s: of a broadcast.  within_s: for the rendezvous.
        """
        self._collective.leave()
        store = reach(address, world, timeout_s=within_s) if rank else self._rendezvous
        assert store is not None, "rank 0 did not open the group"
        self._rendezvous = None
        self._collective.group = WeightGroup(store, rank=rank, world=world, device=self._device, timeout_s=timeout_s)

    def leave_group(self) -> None:
        """May be called during a transfer, which then fails."""
        self._collective.leave()

    # Sending.

    def hold_export(self, *, policy: Policy, kind: Literal["full", "lora", "merged"]) -> None:
        """Collective. Export the weights; `ship` sends them."""
        self._export = self._parts.backend.export_weights(policy=policy, kind=kind)

    def ship(self, receivers: Sequence[str], *, carrier: tuple[str, str], bucket_bytes: int) -> Shipped:
        """Send the exported weights to the named workers. Several receive the same buckets concurrently.

        Raises EchoMismatch when a receiver ends up with other weights, and any error a receiver raises.
        """
        assert self._export is not None, f"worker {self._name!r} has exported nothing"
        announced = 0

        def to(method: str, *args: Any) -> list[Any]:
            nonlocal announced
            data = packed((args, {}))
            # A ticket may be the weights themselves; count only the rest.
            announced += (len(data) - sum(arg.nbytes for arg in args if isinstance(arg, Tensor))) * len(receivers)
            try:
                return [unpacked(answer) for answer in self._tell(receivers, method, data)]
            except BaseException:
                # Every participant of a broadcast waits for all others.
                self._collective.leave()
                raise

        def begin(manifest: Manifest) -> None:
            to("weights.begin", manifest)

        def take(number: int, ticket: Any) -> None:
            to("weights.take", number, ticket)

        def finish() -> WeightReceipt:
            receipts: list[WeightReceipt] = to("weights.finish")
            for name, receipt in zip(receivers, receipts, strict=True):
                if receipt != receipts[0]:
                    raise EchoMismatch(
                        f"weights: all got the same update, but worker {receivers[0]!r} holds {receipts[0]} and worker "
                        f"{name!r} holds {receipt}."
                    )
            return receipts[0]

        report = send(
            self._export,
            carrier=self._carrier(*carrier),
            begin=begin,
            take=take,
            finish=finish,
            bucket_bytes=bucket_bytes,
        )
        return Shipped(report=report, announced_bytes=announced)

    def forget_export(self) -> None:
        self._export = None

    # Taking.

    def open_receiver(self, *, carrier: tuple[str, str]) -> None:
        """Prepare to receive weights: for the engine, or for the module it samples with."""

        def apply(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
            update = WeightUpdate(
                version=manifest.version,
                tensors=tensors,
                kind=manifest.kind,
                adapter=manifest.adapter,
                adapter_scale=manifest.adapter_scale,
                checksum=manifest.checksum,
            )
            if self._shares_module:
                self._parts.backend.adopt(update)
                self._parts.engine.version = manifest.version
            else:
                self._parts.engine.load_weights(update)

        self._receiver = Receiver(self._carrier(*carrier), apply=apply)

    def begin(self, manifest: Manifest) -> None:
        self._open().begin(manifest)

    def take(self, number: int, ticket: Any) -> None:
        self._open().take(number, ticket)

    def finish(self) -> WeightReceipt:
        return self._open().finish()

    def _open(self) -> Receiver:
        assert self._receiver is not None, f"worker {self._name!r} has no receiver"
        return self._receiver

    def _carrier(self, name: str, folder: str) -> Carrier:
        """The configured carrier; both ends use this."""
        carriers: dict[str, Callable[[], Carrier]] = {
            "collective": lambda: self._collective,
            "cuda-ipc": CudaIpcCarrier,
            "disk": lambda: DiskCarrier(Path(folder)),
            "ray": ByValueCarrier,
            "shared-memory": SharedMemoryCarrier,
        }
        return carriers[name]()
