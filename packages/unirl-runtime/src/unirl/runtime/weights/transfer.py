"""One protocol for weights: a manifest first, then buckets, then a receipt with what is really held.

Sender and receiver each compute the checksum of every tensor from the bytes on their own side. A receiver hands the
tensors on only when all of them have come and agree, so an update is never applied by half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from unirl.core.errors import EchoMismatch
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.weights import joined, tensor_digest, weight_mismatch

from .carriers import Carrier, Ticket
from .manifest import BUCKET_BYTES, Manifest, pack, plan_transfer, unpack

__all__ = ["Receiver", "TransferReport", "send"]


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What one transfer cost."""

    receipt: WeightReceipt
    num_tensors: int
    size_bytes: int
    """Of the tensors; what the carrier adds is not counted."""
    num_buckets: int
    seconds: float
    checksum_seconds: float
    """Of `seconds`, on the sender's side."""


class Receiver:
    """The receiving half. Lives where the weights are to be."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        holds: Mapping[str, Tensor] | None = None,
        apply: Callable[[Manifest, dict[str, Tensor]], None],
    ) -> None:
        """holds: what the update must match in names, shapes and dtypes; None takes any names (LoRA by adapter).

        apply: takes a complete and verified update. What it raises leaves `is_usable` false.
        """
        self._carrier = carrier
        self._holds = None if holds is None else dict(holds)
        self._apply = apply
        self._manifest: Manifest | None = None
        self._found: dict[str, Tensor] = {}
        self.is_usable = True
        """False after an update that failed while it was applied, until a later one succeeds."""

    def begin(self, manifest: Manifest) -> None:
        """Take the manifest, or refuse it before any bytes are sent. Raises EchoMismatch."""
        self._manifest, self._found = None, {}
        if self._holds is not None:
            mismatch = weight_mismatch({info.name: info for info in manifest.tensors}, self._holds)
            if mismatch:
                raise EchoMismatch(f"weights: {manifest.kind} of version {manifest.version}: {mismatch}")
        self._manifest = manifest

    def take(self, number: int, ticket: Ticket) -> None:
        """Take one bucket. Raises EchoMismatch for bytes that are not those that were announced."""
        manifest = self._expected()
        try:
            tensors = unpack(manifest, manifest.buckets[number], self._carrier.receive(ticket))
        except ValueError as error:
            raise EchoMismatch(f"weights: bucket {number} of version {manifest.version}: {error}.") from error
        for name, tensor in tensors.items():
            found, sent = tensor_digest(name, tensor), manifest.info(name).digest
            if found != sent:
                raise EchoMismatch(
                    f"weights: {name!r} of version {manifest.version} was sent with checksum {sent} and came with "
                    f"{found}: its bytes changed on the way by {type(self._carrier).__name__}."
                )
        self._found |= tensors

    def finish(self) -> WeightReceipt:
        """Apply the update and say what is held. Raises EchoMismatch when something of it is missing."""
        manifest = self._expected()
        missing = sorted({info.name for info in manifest.tensors} - self._found.keys())
        if missing:
            raise EchoMismatch(
                f"weights: {len(missing)} of {len(manifest.tensors)} tensors of version {manifest.version} never came, "
                f"such as {missing[0]!r}; nothing was applied."
            )
        tensors, self._manifest, self._found = self._found, None, {}
        checksum = joined(tensor_digest(name, tensors[name]) for name in sorted(tensors))
        self.is_usable = False
        self._apply(manifest, tensors)
        self.is_usable = True
        return WeightReceipt(
            version=manifest.version,
            checksum=checksum,
            num_tensors=len(tensors),
            size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        )

    def _expected(self) -> Manifest:
        if self._manifest is None:
            raise EchoMismatch("weights: a bucket came without a manifest, or after one that was refused.")
        return self._manifest


def send(
    update: WeightUpdate,
    *,
    carrier: Carrier,
    begin: Callable[[Manifest], None],
    take: Callable[[int, Ticket], None],
    finish: Callable[[], WeightReceipt],
    bucket_bytes: int = BUCKET_BYTES,
    names: Mapping[str, str] | None = None,
) -> TransferReport:
    """Send an update and compare the receipt with what was sent.

    begin, take, finish: those of the `Receiver`, directly or through a call to its process.
    Raises EchoMismatch when the receiver holds something else, and lets through what it raises.
    """
    began = time.perf_counter()
    manifest, tensors = plan_transfer(update, bucket_bytes=bucket_bytes, names=names)
    planned = time.perf_counter()
    begin(manifest)
    for number, bucket in enumerate(manifest.buckets):
        ticket = carrier.send(pack(manifest, bucket, tensors))
        try:
            take(number, ticket)
        finally:
            carrier.release(ticket)
    receipt = finish()
    if (receipt.version, receipt.checksum) != (manifest.version, manifest.checksum):
        raise EchoMismatch(
            f"weights: version {manifest.version} with checksum {manifest.checksum} was sent; version "
            f"{receipt.version} with checksum {receipt.checksum} is held."
        )
    return TransferReport(
        receipt=receipt,
        num_tensors=len(manifest.tensors),
        size_bytes=manifest.size_bytes,
        num_buckets=len(manifest.buckets),
        seconds=time.perf_counter() - began,
        checksum_seconds=planned - began,
    )
