"""A process with its own transport, as the workers of a run have one."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.roles import TransportPlace
from unirl.transports.transfer_queue.config import TransferQueueConfig
from unirl.transports.transfer_queue.transport import TransferQueueTransport, build


def place(run: str, process: str, address: Any = None) -> TransportPlace:
    def ask(process: str, question: Any) -> Any:
        raise AssertionError(f"{process} was asked {question!r}; everything goes through the queue")

    return TransportPlace(run=run, process=process, device="cpu", ask=ask, address=address)


class QueueWorker:
    def __init__(self, config: TransferQueueConfig, run: str, process: str, address: Any) -> None:
        torch.set_num_threads(1)
        self._transport: TransferQueueTransport = build(config, place=place(run, process, address))

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._transport, method)(*args)

    def threads(self) -> int:
        return torch.get_num_threads()
