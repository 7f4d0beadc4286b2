"""The two ends of a transfer of weights, as a worker has them: it sends what it exported, or takes what it is sent."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from unirl.core.errors import EchoMismatch
from unirl.core.parts import Parts
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
"""Ask the workers of these names at once: a method, its packed arguments, and their packed answers in that order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipped:
    """One transfer of weights."""

    report: TransferReport
    """What each receiver took."""
    announced_bytes: int
    """What all receivers were sent beside the tensors: names, shapes and checksums, and where the bytes are."""


class WeightEnds(ABC):
    """Part of a `Worker`, which says who it is and what it has."""

    _name: str
    _tell: Tell
    _device: torch.device

    def __init__(self) -> None:
        self._export: WeightUpdate | None = None
        self._receiver: Receiver | None = None
        self._collective = CollectiveCarrier()
        self._meeting: Store | None = None

    @property
    @abstractmethod
    def parts(self) -> Parts: ...

    @property
    @abstractmethod
    def _samples_with_module(self) -> bool:
        """Whether the engine samples with the module of this worker, and has no weights of its own."""

    # The group of the carrier `collective`: the sender, its rank 0, and the receivers.

    def open_weight_group(self, world: int, *, within_s: float) -> Address:
        """Rank 0: be there for the others."""
        self._collective.leave()
        self._meeting, address = listen(world, timeout_s=within_s)
        return address

    def join_weight_group(self, address: Address, *, rank: int, world: int, timeout_s: float, within_s: float) -> None:
        """Collective. A group that this worker is in is left for the new one.

        timeout_s: of a broadcast.  within_s: for the others to come.
        """
        self._collective.leave()
        store = reach(address, world, timeout_s=within_s) if rank else self._meeting
        assert store is not None, "rank 0 did not open the group"
        self._meeting = None
        self._collective.group = WeightGroup(store, rank=rank, world=world, device=self._device, timeout_s=timeout_s)

    def leave_weight_group(self) -> None:
        """May be called while a transfer is on its way, which ends with an error."""
        self._collective.leave()

    # Sending.

    def export_weights(self, *, policy: Policy, kind: Literal["full", "lora", "merged"]) -> None:
        """Export the weights, which all ranks do together; `ship_weights` sends them."""
        self._export = self.parts.backend.weights(policy=policy, kind=kind)

    def ship_weights(self, receivers: Sequence[str], *, carrier: tuple[str, str], bucket_bytes: int) -> Shipped:
        """Send what was exported to other workers, by their names. Several take the same buckets at the same time.

        Raises EchoMismatch when one of them holds something else afterwards, and what they raise.
        """
        assert self._export is not None, f"worker {self._name!r} has exported nothing"
        announced = 0

        def to(method: str, *args: Any) -> list[Any]:
            nonlocal announced
            data = packed((args, {}))
            # Of a ticket that is the weights themselves, only what is beside them.
            announced += (len(data) - sum(arg.nbytes for arg in args if isinstance(arg, Tensor))) * len(receivers)
            try:
                return [unpacked(answer) for answer in self._tell(receivers, method, data)]
            except BaseException:
                # Who takes part in a broadcast waits for everybody else who does.
                self._collective.leave()
                raise

        def begin(manifest: Manifest) -> None:
            to("begin_weights", manifest)

        def take(number: int, ticket: Any) -> None:
            to("take_weights", number, ticket)

        def finish() -> WeightReceipt:
            receipts: list[WeightReceipt] = to("finish_weights")
            for name, receipt in zip(receivers, receipts, strict=True):
                if receipt != receipts[0]:
                    raise EchoMismatch(
                        f"weights: the same was sent to all; worker {receivers[0]!r} holds {receipts[0]}, worker "
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
        """Be ready for weights: for the engine, or for the module that it samples with."""

        def apply(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
            update = WeightUpdate(
                version=manifest.version,
                tensors=tensors,
                kind=manifest.kind,
                adapter=manifest.adapter,
                adapter_scale=manifest.adapter_scale,
                checksum=manifest.checksum,
            )
            if self._samples_with_module:
                self.parts.backend.adopt(update)
                self.parts.engine.version = manifest.version
            else:
                self.parts.engine.load_weights(update)

        self._receiver = Receiver(self._carrier(*carrier), apply=apply)

    def begin_weights(self, manifest: Manifest) -> None:
        self._open().begin(manifest)

    def take_weights(self, number: int, ticket: Any) -> None:
        self._open().take(number, ticket)

    def finish_weights(self) -> WeightReceipt:
        return self._open().finish()

    def _open(self) -> Receiver:
        assert self._receiver is not None, f"worker {self._name!r} has no receiver"
        return self._receiver

    def _carrier(self, name: str, folder: str) -> Carrier:
        """The carrier of a setting; both ends make theirs with this."""
        carriers: dict[str, Callable[[], Carrier]] = {
            "collective": lambda: self._collective,
            "cuda-ipc": CudaIpcCarrier,
            "disk": lambda: DiskCarrier(Path(folder)),
            "ray": ByValueCarrier,
            "shared-memory": SharedMemoryCarrier,
        }
        return carriers[name]()
