"""Both ends of a weight transfer on a worker: send its exported weights, or receive an update."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from unirl.core.errors import EchoMismatch
from unirl.core.roles import Policy, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Plan
from unirl.core.types.weights import MadeTensors, forms, tensor_digests
from unirl.loop.parts import Parts, weight_dtypes
from unirl.transfer.weights.carriers import (
    ByValueCarrier,
    Carrier,
    CollectiveCarrier,
    CudaIpcCarrier,
    DiskCarrier,
    SharedMemoryCarrier,
)
from unirl.transfer.weights.group import Address, WeightGroup, listen, reach
from unirl.transfer.weights.manifest import Manifest
from unirl.transfer.weights.transfer import Receiver, TransferReport, send
from unirl.transfer.wire import packed, unpacked

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

    def __init__(self, name: str, *, parts: Parts, plan: Plan, tell: Tell, device: torch.device, host: str) -> None:
        """name: of the worker.  host: IP address of its machine."""
        self._name, self._parts, self._tell, self._device, self._host = name, parts, tell, device, host
        self._plan = plan
        self._export: WeightUpdate | None = None
        self._receivers: dict[str, Receiver] = {}
        """By stage."""
        self._taking = ""
        """Stage whose weights are being received."""
        self._collective = CollectiveCarrier()
        self._rendezvous: Store | None = None

    # The group of the carrier `collective`: the sender, its rank 0, and the receivers.

    def open_group(self, world: int, *, within_s: float) -> Address:
        """Rank 0: open the TCPStore for the rendezvous."""
        self._collective.leave()
        self._rendezvous, address = listen(self._host, world, timeout_s=within_s)
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

    def hold_export(
        self,
        learner: str,
        *,
        policy: Policy,
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None,
    ) -> None:
        """Collective. Export the weights; then one rank calls `ship` while the others call `assist`."""
        update = self._parts.backends[learner].export_weights(policy=policy, kind=kind, dtypes=dtypes)
        digests = update.digests or tensor_digests(update.tensors)
        self._export = dataclasses.replace(update, digests=digests)

    def ship(self, stage: str, receivers: Sequence[str], *, carrier: tuple[str, str], bucket_bytes: int) -> Shipped:
        """Send the exported weights to the engine of a stage on the named workers, bucket by bucket. Several receive
        the same ones concurrently.

        Raises EchoMismatch when a receiver ends up with other weights, and any error a receiver raises.
        """
        update = self._exported()
        making = _InStep(update.tensors)
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
            to("weights.begin", stage, manifest)

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

        with making:
            report = send(
                dataclasses.replace(update, tensors=making),
                carrier=self._carrier(*carrier),
                begin=begin,
                take=take,
                finish=finish,
                bucket_bytes=bucket_bytes,
            )
        return Shipped(report=report, announced_bytes=announced)

    def assist(self) -> None:
        """Take part in the gather of every tensor that another rank ships, and keep none."""
        with _InStep(self._exported().tensors):
            pass

    def forget_export(self) -> None:
        self._export = None

    def _exported(self) -> WeightUpdate:
        assert self._export is not None, f"worker {self._name!r} has exported nothing"
        return self._export

    # Taking.

    def open_receiver(self, stage: str, *, carrier: tuple[str, str]) -> None:
        """Prepare to receive weights for the engine of a stage, or for the module that it samples with."""
        chosen, engine = self._plan.stage(stage), self._parts.engines[stage]
        shares_module = Cap.WEIGHTS_SHARED in chosen.engine.spec.capabilities

        def apply(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
            update = WeightUpdate(
                version=manifest.version,
                tensors=tensors,
                kind=manifest.kind,
                adapter=manifest.adapter,
                adapter_scale=manifest.adapter_scale,
                checksum=manifest.checksum,
            )
            if shares_module:
                self._parts.backends[chosen.learner.name].adopt(update)
                engine.version = manifest.version
            else:
                if self._device.type == "cuda":
                    # The engine's own process loads the update on this device next, and needs the memory of buckets.
                    torch.cuda.empty_cache()
                engine.load_weights(update)

        # An external engine reads the update from the CPU, so the device need not hold a second copy.
        device = None if shares_module else "cpu"
        self._receivers[stage] = Receiver(self._carrier(*carrier), device=device, apply=apply)

    def dtypes(self, stage: str) -> Mapping[str, str] | None:
        """Those in which the engine of a stage takes full weights, see `unirl.core.roles.Engine`."""
        return weight_dtypes(self._parts.engines[stage])

    def begin(self, stage: str, manifest: Manifest) -> None:
        self._taking = stage
        self._open().begin(manifest)

    def take(self, number: int, ticket: Any) -> None:
        self._open().take(number, ticket)

    def finish(self) -> WeightReceipt:
        return self._open().finish()

    def _open(self) -> Receiver:
        assert self._taking in self._receivers, f"worker {self._name!r} has no receiver for {self._taking!r}"
        return self._receivers[self._taking]

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


class _InStep(MadeTensors):
    """Tensors that all train ranks make together, in the order of their names.

    At the end of the block the rest of them is made, also after an error: the other ranks wait in their gathers.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        def make(name: str) -> Tensor:
            assert name == self._left[0], f"{name!r} was asked for, but {self._left[0]!r} is next on all ranks"
            self._left.popleft()
            return tensors[name]

        super().__init__({name: functools.partial(make, name) for name in tensors}, forms=forms(tensors))
        self._left = deque(sorted(tensors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or dist.is_initialized():
            # A rank that fails in a gather fails in the next one too; the first error is the one to tell.
            with nullcontext() if kind is None else suppress(RuntimeError):
                while self._left:
                    self[self._left[0]]
