"""The weight-transfer protocol: a manifest, then buckets, then a receipt of the weights actually held.

Sender and receiver each compute the checksum of every tensor from the bytes on their own side. A receiver applies the
tensors only after all have arrived and match, so updates are atomic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from unirl.core.errors import EchoMismatch
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.weights import joined, tensor_digest, weight_mismatch

from .carriers import Carrier, Ticket
from .manifest import BUCKET_BYTES, Manifest, pack, plan_transfer, unpack

__all__ = ["Receiver", "TransferReport", "send"]


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """The cost of one transfer."""

    receipt: WeightReceipt
    num_tensors: int
    size_bytes: int
    """Bytes of the tensors, without the carrier's overhead."""
    num_buckets: int
    seconds: float
    checksum_seconds: float
    """Part of `seconds` spent on the sender's side."""


class Receiver:
    """The receiving end, in the process that holds the weights."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        holds: Mapping[str, Tensor] | None = None,
        device: str | None = None,
        apply: Callable[[Manifest, dict[str, Tensor]], None],
    ) -> None:
        """holds: names, shapes and dtypes the update must match; None accepts any names (LoRA by adapter).

        device: where the tensors of an update are collected; None leaves them where the carrier puts them.
        apply: applies a complete and verified update.
        """
        self._carrier, self._device = carrier, device
        self._holds = None if holds is None else dict(holds)
        self._apply = apply
        self._manifest: Manifest | None = None
        self._found: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest) -> None:
        """Accept the manifest, or reject it with EchoMismatch before any data is sent."""
        self._manifest, self._found = None, {}
        if self._holds is not None:
            mismatch = weight_mismatch({info.name: info for info in manifest.tensors}, self._holds)
            if mismatch:
                raise EchoMismatch(f"weights: {manifest.kind} of version {manifest.version}: {mismatch}")
        self._manifest = manifest

    def take(self, number: int, ticket: Ticket) -> None:
        """Receive one bucket. Raises EchoMismatch for bytes that do not match the manifest."""
        manifest = self._expected()
        try:
            tensors = unpack(manifest, manifest.buckets[number], self._carrier.receive(ticket))
        except ValueError as error:
            raise EchoMismatch(f"weights: bucket {number} of version {manifest.version}: {error}.") from error
        for name, tensor in tensors.items():
            result, sent = tensor_digest(name, tensor), manifest.info(name).digest
            if result != sent:
                raise EchoMismatch(
                    f"weights: {name!r} of version {manifest.version} was sent with checksum {sent} but received with "
                    f"{result}: its bytes were corrupted in transit by {type(self._carrier).__name__}."
                )
        self._found |= {name: tensor.to(self._device or tensor.device) for name, tensor in tensors.items()}

    def finish(self) -> WeightReceipt:
        """Apply the update and report the weights held. Raises EchoMismatch when tensors are missing."""
        manifest = self._expected()
        missing = sorted({info.name for info in manifest.tensors} - self._found.keys())
        if missing:
            raise EchoMismatch(
                f"weights: {len(missing)} of {len(manifest.tensors)} tensors of version {manifest.version} are "
                f"missing, such as {missing[0]!r}; nothing was applied."
            )
        tensors, self._manifest, self._found = self._found, None, {}
        # From digests already verified against these tensors on arrival.
        checksum = joined(info.digest for info in manifest.tensors)
        self._apply(manifest, tensors)
        return WeightReceipt(
            version=manifest.version,
            checksum=checksum,
            num_tensors=len(tensors),
            size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        )

    def _expected(self) -> Manifest:
        if self._manifest is None:
            raise EchoMismatch("weights: got a bucket without a manifest, or after a rejected one.")
        return self._manifest


def send(
    update: WeightUpdate,
    *,
    carrier: Carrier,
    begin: Callable[[Manifest], None],
    take: Callable[[int, Ticket], None],
    finish: Callable[[], WeightReceipt],
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferReport:
    """Send an update and compare the receipt with what was sent.

    begin, take, finish: the `Receiver`'s methods, called directly or remotely.
    Raises EchoMismatch when the receiver holds other weights; its own errors pass through.
    """
    began = time.perf_counter()
    manifest = plan_transfer(update, bucket_bytes=bucket_bytes)
    planned = time.perf_counter()
    begin(manifest)
    for number, bucket in enumerate(manifest.buckets):
        ticket = carrier.send(pack(bucket, update.tensors))
        try:
            take(number, ticket)
        finally:
            carrier.release(ticket)
    receipt = finish()
    if (receipt.version, receipt.checksum) != (manifest.version, manifest.checksum):
        raise EchoMismatch(
            f"weights: sent version {manifest.version} with checksum {manifest.checksum}, but the receiver holds "
            f"version {receipt.version} with checksum {receipt.checksum}."
        )
    return TransferReport(
        receipt=receipt,
        num_tensors=len(manifest.tensors),
        size_bytes=manifest.size_bytes,
        num_buckets=len(manifest.buckets),
        seconds=time.perf_counter() - began,
        checksum_seconds=planned - began,
    )
