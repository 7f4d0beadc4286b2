"""Tensor transport over TransferQueue: rows are put by the worker that produced them and fetched by their consumer."""

from __future__ import annotations

import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.roles import RemoteRowsLike, TransportCounts, TransportPlace
from unirl.core.specs.check import check_config

from .config import TransferQueueConfig
from .service import Address, Service

__all__ = ["Column", "TransferQueueTransport", "build"]

IO_THREADS = 2
"""I/O threads of a client's sockets."""


@dataclass(frozen=True)
class Column:
    """A tensor in the queue: one field of a partition, whose keys are the numbers of its rows."""

    partition: str
    field: str


def build(config: TransferQueueConfig, *, place: TransportPlace) -> TransferQueueTransport:
    """A client of the queue; in the driver, it also starts the services.

    Raises RecipeError for settings out of limits, RunFailed when it hangs.
    """
    check_config(config, key="transport")
    # Read when TransferQueue is imported: its calls would set torch's threads to 8, and then to those of its import.
    os.environ.setdefault("TQ_NUM_THREADS", str(torch.get_num_threads()))
    # Mooncake logs very verbosely.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    service = None if place.address is not None else Service(config)
    return TransferQueueTransport(place, service=service)


class TransferQueueTransport:
    """One process's client of the run's queue. Implements `unirl.core.roles.Transport`.

    Every call of `keep` makes a partition for each number of rows.
    """

    def __init__(self, place: TransportPlace, *, service: Service | None) -> None:
        """service: in the driver, what it started; closed with this."""
        self._place = place
        self._device = torch.device(place.device)
        self._service = service
        self.address: Address = service.address if service is not None else place.address
        self._client: Any = None
        self._kept: dict[str, dict[Column, int]] = {}
        """Partition -> column that was put there and not dropped -> its bytes."""
        self._life = secrets.token_hex(4)
        """A worker that replaces a dead one has its name, but must not get its partitions."""
        self._count = 0
        self._lock = threading.Lock()
        self._sent = self._fetched = 0

    def counts(self) -> TransportCounts:
        with self._lock:
            held = sum(size for columns in self._kept.values() for size in columns.values())
            return TransportCounts(bytes_sent=self._sent, bytes_fetched=self._fetched, bytes_held=held)

    def keep(self, tensors: Sequence[Tensor]) -> list[Column]:
        """Puts the tensors, those of equally many rows together."""
        by_rows: dict[int, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            by_rows[tensor.shape[0]].append(index)
        columns: dict[int, Column] = {}
        for rows, indices in by_rows.items():
            self._count += 1
            partition = f"{self._place.process}-{self._life}/{self._count}"
            # Mooncake knows an object by its field alone, whatever run put it there.
            columns |= {index: Column(partition, f"{self._place.run}/{partition}/{index}") for index in indices}
            # No row of such a tensor has a byte to put.
            filled = {columns[index]: tensors[index].detach().cpu() for index in indices if tensors[index].nbytes}
            if filled:
                self._put(partition, rows, filled)
        return [columns[index] for index in range(len(tensors))]

    def drop(self, names: Sequence[Column] | None = None) -> None:
        """Forget these columns, or all. The queue clears a partition as a whole: once nothing of it is kept."""
        with self._lock:
            if names is None:
                names = [column for columns in self._kept.values() for column in columns]
            for name in names:
                self._kept.get(name.partition, {}).pop(name, None)
            over = [partition for partition, columns in self._kept.items() if not columns]
            for partition in over:
                del self._kept[partition]
        for partition in over:
            self._joined().clear_partition(partition)

    def fetch(self, wanted: Sequence[RemoteRowsLike]) -> list[Tensor]:
        """The tensors, on this worker's device. One get for columns of a partition with the same rows wanted."""
        rows_of: dict[Column, set[int]] = defaultdict(set)
        for remote in wanted:
            if _size_bytes(remote):
                for piece in remote.pieces:
                    rows_of[piece.blob].update(range(piece.start, piece.start + piece.count))
        together: dict[tuple[str, tuple[int, ...]], list[Column]] = defaultdict(list)
        for column, rows in rows_of.items():
            together[column.partition, tuple(sorted(rows))].append(column)
        result: dict[Column, dict[int, Tensor]] = {}
        for (partition, rows), columns in together.items():
            result |= self._get(partition, rows, columns)
        return [self._assembled(remote, result) for remote in wanted]

    def answer(self, question: Any) -> Any:
        raise RuntimeError("transport: processes ask the queue, not each other")

    def close(self) -> None:
        """Clear what this process put and leave; in the driver, stop what all use. May be called twice."""
        client, service = self._client, self._service
        try:
            # What the driver is about to stop holds nothing afterwards.
            if client is not None and service is None:
                self.drop()
        finally:
            self._client = self._service = None
            try:
                if client is not None:
                    _leave(client)
            finally:
                if service is not None:
                    service.stop()

    def _put(self, partition: str, rows: int, columns: dict[Column, Tensor]) -> None:
        from tensordict import TensorDict

        client = self._joined()
        meta = client.kv_retrieve_meta([str(row) for row in range(rows)], partition, create=True)
        sizes = {column: tensor.nbytes for column, tensor in columns.items()}
        with self._lock:
            self._kept[partition] = sizes
        fields = {column.field: tensor for column, tensor in columns.items()}
        client.put(TensorDict(fields, batch_size=[rows]), metadata=meta)
        with self._lock:
            self._sent += sum(sizes.values())

    def _get(self, partition: str, rows: Sequence[int], columns: Sequence[Column]) -> dict[Column, dict[int, Tensor]]:
        """column -> row -> its numbers, as the queue gives them."""
        from transfer_queue import StorageKeyNotFoundError

        client, fields = self._joined(), [column.field for column in columns]
        meta = client.kv_retrieve_meta([str(row) for row in rows], partition)
        if meta.size < len(rows) or not set(fields) <= set(meta.field_names):
            raise self._gone(partition, rows)
        try:
            data = client.get_data(meta.select_fields(fields))
        except StorageKeyNotFoundError as error:
            raise self._gone(partition, rows) from error
        # Rows come as a nested tensor even where all have one shape; a list of tensors is the same for every storage.
        result = {column: dict(zip(rows, data[column.field].unbind(0), strict=True)) for column in columns}
        with self._lock:
            self._fetched += sum(row.nbytes for column in result.values() for row in column.values())
        return result

    def _assembled(self, remote: RemoteRowsLike, found: dict[Column, dict[int, Tensor]]) -> Tensor:
        shape = tuple(remote.shape)
        if not _size_bytes(remote):
            return torch.empty(shape, dtype=remote.dtype, device=self._device)
        rows = [found[p.blob][p.start + offset].reshape(shape[1:]) for p in remote.pieces for offset in range(p.count)]
        return torch.stack(rows).to(self._device)

    def _gone(self, partition: str, rows: Sequence[int]) -> RunFailed:
        return RunFailed(
            f"transport: rows {rows[0]} to {rows[-1]} of partition {partition!r} are not in the queue: they were "
            "dropped, and their rollout is over, or never put."
        )

    def _joined(self) -> Any:
        if self._client is None:
            from transfer_queue import TransferQueueClient

            settings = dict(self.address.settings)
            if self._place.process == "driver" and "global_segment_size" in settings:
                # Rows of the workers are not to lie in the driver.
                settings["global_segment_size"] = 0
            client: Any = TransferQueueClient(
                f"{self._place.run}/{self._place.process}", self.address.controller, zmq_io_threads=IO_THREADS
            )
            try:
                client.initialize_storage_manager(self.address.manager, settings)
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client


def _size_bytes(remote: RemoteRowsLike) -> int:
    return torch.Size(remote.shape).numel() * remote.dtype.itemsize


def _leave(client: Any) -> None:
    store = getattr(client.storage_manager, "storage_client", None)
    client.close()
    if store is not None:
        # TransferQueue leaves a key-value store open, and its memory mounted.
        store.close()
