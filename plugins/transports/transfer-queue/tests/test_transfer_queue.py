"""Tensors through the queue between processes: what comes is what went, what is dropped is gone, nothing stays."""

from __future__ import annotations

import importlib.util
import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import ray
import torch
from queue_worker import QueueWorker, place
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.roles import Transport, TransportCounts
from unirl.transfer.remote_rows import Piece, RemoteRows
from unirl.transports.transfer_queue.config import TransferQueueConfig
from unirl.transports.transfer_queue.transport import TransferQueueTransport, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

NO_MOONCAKE = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="not run: the extra mooncake-cpu is not installed"
)


class Queue:
    """A driver and the workers `a` and `b` of a run."""

    def __init__(self, config: TransferQueueConfig, *, run: str) -> None:
        self.config, self.run = config, run
        self.driver = build(config, place=place(run, "driver"))
        self._workers: dict[str, Any] = {}

    def handle(self, name: str) -> Any:
        if name not in self._workers:
            actor: Any = ray.remote(num_cpus=0.1)(QueueWorker)
            self._workers[name] = actor.remote(self.config, self.run, name, self.driver.address)
        return self._workers[name]

    def call(self, name: str, method: str, *args: Any) -> Any:
        return ray.get(self.handle(name).call.remote(method, *args), timeout=120)

    def keep(self, owner: str, *tensors: Tensor) -> list[RemoteRows]:
        names = self.call(owner, "keep", tensors)
        return [
            RemoteRows([Piece(name, 0, len(tensor))], row_shape=tuple(tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in zip(names, tensors, strict=True)
        ]

    def fetch(self, reader: str, *rows: RemoteRows) -> list[Tensor]:
        return self.call(reader, "fetch", rows)

    def counts(self, name: str) -> TransportCounts:
        return self.call(name, "counts")

    def close(self) -> None:
        for worker in self._workers.values():
            ray.get(worker.call.remote("close"), timeout=120)
            ray.kill(worker)
        self.driver.close()


CONFIGS = {
    "simple": TransferQueueConfig(units=2),
    "mooncake": TransferQueueConfig(storage="mooncake", segment_mb=64, buffer_mb=64),
}


@pytest.fixture(
    scope="module", params=["simple", pytest.param("mooncake", marks=NO_MOONCAKE)], ids=lambda storage: storage
)
def queue(request: pytest.FixtureRequest, ray_here: None) -> Iterator[Queue]:
    queue = Queue(CONFIGS[request.param], run=f"run-{request.param}")
    try:
        yield queue
    finally:
        queue.close()


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values > 0 if dtype is torch.bool else values.to(dtype) / (1 if dtype is torch.int64 else 8)


def test_it_fits_the_role(queue: Queue) -> None:
    transport: Transport = queue.driver
    assert isinstance(transport, TransferQueueTransport)


def test_tensors_of_every_kind_come_bit_for_bit(queue: Queue) -> None:
    special = torch.tensor([[float("nan"), -0.0], [0.0, float("-inf")], [2.0**-149, 1.0]])
    sent = [
        random(3, 4, 5, 5, seed=1),
        random(3, 7, seed=2, dtype=torch.bfloat16),
        random(3, 2, 3, 4, 5, seed=3, dtype=torch.float16),
        random(3, 2, seed=4, dtype=torch.int64),
        random(3, 9, seed=5, dtype=torch.bool),
        random(3, seed=6),
        special,
        # Another number of rows; rows that are not contiguous.
        random(5, 6, seed=7),
        random(6, 5, seed=8).t(),
    ]
    result = queue.fetch("b", *queue.keep("a", *sent))
    for mine, theirs in zip(sent, result, strict=True):
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
        assert torch.equal(theirs.contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8))


def test_rows_of_several_workers_come_in_any_order_more_than_once(queue: Queue) -> None:
    of_a, of_b, other = random(5, 3, 2, seed=1), random(4, 3, 2, seed=2), random(5, 6, seed=3)
    (rows_a, rows_other), (rows_b,) = queue.keep("a", of_a, other), queue.keep("b", of_b)
    order = torch.tensor([8, 0, 0, 5, 3, 8, 1])
    mixed = torch.cat([rows_a, rows_b]).index_select(0, order)
    for reader in ("a", "b"):
        result = queue.fetch(reader, mixed, rows_other[1:3], rows_b[:0])
        assert torch.equal(result[0], torch.cat([of_a, of_b]).index_select(0, order))
        assert torch.equal(result[1], other[1:3])
        assert result[2].shape == (0, 3, 2)


def test_rows_without_a_byte_need_no_queue(queue: Queue) -> None:
    (rows,) = queue.keep("a", torch.zeros(4, 0, 3, dtype=torch.bfloat16))
    (result,) = queue.fetch("b", rows)
    assert (result.shape, result.dtype) == ((4, 0, 3), torch.bfloat16)


def test_the_driver_holds_names_alone_and_can_fetch(queue: Queue) -> None:
    sent = random(4, 64, 64, seed=1)
    (rows,) = queue.keep("a", sent)
    assert len(pickle.dumps(rows.pieces[0].blob)) < 1024
    before = queue.driver.counts()
    assert torch.equal(queue.driver.fetch([rows[1:2]])[0], sent[1:2])
    # One row of 64 x 64 fp32 numbers.
    assert queue.driver.counts().bytes_fetched - before.bytes_fetched == 64 * 64 * 4
    assert (before.bytes_sent, before.bytes_held) == (0, 0)


def test_bytes_are_counted_where_they_pass(queue: Queue) -> None:
    queue.call("a", "drop")
    a, b = queue.counts("a"), queue.counts("b")
    first, second = queue.keep("a", random(5, 3, seed=1), random(4, 2, seed=2, dtype=torch.bfloat16))
    queue.fetch("b", first[:2], second)
    put, got = 5 * 3 * 4 + 4 * 2 * 2, 2 * 3 * 4 + 4 * 2 * 2
    assert queue.counts("a") == TransportCounts(
        bytes_sent=a.bytes_sent + put, bytes_fetched=a.bytes_fetched, bytes_held=put
    )
    assert queue.counts("b").bytes_fetched == b.bytes_fetched + got
    queue.call("a", "drop", [second.pieces[0].blob])
    assert queue.counts("a").bytes_held == 5 * 3 * 4


def test_what_is_dropped_is_gone_by_name_and_the_rest_stays(queue: Queue) -> None:
    gone, stays = queue.keep("a", random(3, 4, seed=1)), queue.keep("a", random(3, 4, seed=2))
    queue.call("a", "drop", [gone[0].pieces[0].blob])
    for reader in ("b", "a"):
        with pytest.raises(RunFailed, match=rf"partition '{gone[0].pieces[0].blob.partition}' are not in the queue"):
            queue.fetch(reader, *gone)
        assert torch.equal(queue.fetch(reader, *stays)[0], random(3, 4, seed=2))
    queue.call("a", "drop")
    with pytest.raises(RunFailed, match="are not in the queue"):
        queue.fetch("b", *stays)
    assert queue.counts("a").bytes_held == 0
    again = queue.keep("a", random(3, 4, seed=3))
    assert again[0].pieces[0].blob not in (gone[0].pieces[0].blob, stays[0].pieces[0].blob)
    assert torch.equal(queue.fetch("b", *again)[0], random(3, 4, seed=3))


def test_it_leaves_torchs_threads_as_they_were(queue: Queue) -> None:
    queue.fetch("b", *queue.keep("a", random(3, 4, seed=1)))
    for name in ("a", "b"):
        assert ray.get(queue.handle(name).threads.remote(), timeout=60) == 1


def test_rollout_after_rollout_leaves_nothing_behind(queue: Queue) -> None:
    """Partitions in the controller are those that are kept, whatever went before."""

    def partitions() -> list[str]:
        return sorted(queue.driver._joined().get_partition_list())

    queue.call("a", "drop")
    queue.call("b", "drop")
    assert partitions() == []
    for seed in range(3):
        (rows,) = queue.keep("a", random(3, 4, seed=seed))
        assert torch.equal(queue.fetch("b", rows)[0], random(3, 4, seed=seed))
        assert partitions() == [rows.pieces[0].blob.partition]
        queue.call("a", "drop")
    assert partitions() == []


def alive() -> set[int]:
    """Processes of queues in this cluster, which this process started."""
    result: set[int] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if title.startswith(("ray::TransferQueueController", "ray::SimpleStorageUnit")):
                result.add(process.pid)
    return result


def test_two_runs_on_one_cluster_know_nothing_of_each_other_and_leave_nothing(ray_here: None) -> None:
    """Drivers that keep their own tensors: two processes of the queue for each run, none for workers."""
    before = alive()
    one, two = (Queue(TransferQueueConfig(), run=run) for run in ("one", "two"))
    try:
        assert len(alive() - before) == 4
        tensors = {queue.run: random(3, 4, seed=seed) for seed, queue in enumerate((one, two))}
        names = {queue.run: queue.driver.keep([tensors[queue.run]])[0] for queue in (one, two)}

        def fetched(queue: Queue, name: Any) -> Tensor:
            return queue.driver.fetch([RemoteRows([Piece(name, 0, 3)], row_shape=(4,), dtype=torch.float32)])[0]

        for mine, theirs in ((one, two), (two, one)):
            assert torch.equal(fetched(mine, names[mine.run]), tensors[mine.run])
            with pytest.raises(RunFailed, match="are not in the queue"):
                fetched(mine, names[theirs.run])
        one.close()
        assert torch.equal(fetched(two, names["two"]), tensors["two"])
    finally:
        one.close()
        two.close()
    end = time.monotonic() + 30
    while alive() != before:
        assert time.monotonic() < end, "a process of a queue outlives its run by 30 s"
        time.sleep(0.1)
