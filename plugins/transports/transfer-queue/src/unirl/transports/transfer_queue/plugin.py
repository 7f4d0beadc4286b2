"""The transport that this dist provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TransportSpec

__all__ = ["TRANSFER_QUEUE", "unirl_transports"]

TRANSFER_QUEUE = TransportSpec(
    name="transfer-queue",
    summary="Tensors go through TransferQueue: dedicated storage processes, or Mooncake over TCP or RDMA",
    build="unirl.transports.transfer_queue.transport:build",
    config="unirl.transports.transfer_queue.config:TransferQueueConfig",
)


@hookimpl
def unirl_transports() -> Iterable[TransportSpec]:
    return [TRANSFER_QUEUE]
