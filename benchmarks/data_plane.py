"""Moving samples from the producing to the consuming worker: by reference, through TransferQueue, by value.

    python benchmarks/data_plane.py [--rounds 7] [--rows 32] [--mooncake]

Every round moves a tensor of each size each way. `reference` is the workers' own store, `queue` the plugin
transfer-queue with its simple storage, `mooncake` the same on a Mooncake store over TCP, and `value` goes through the
driver. Prints minima over rounds, from storing the tensor to the consumer's answer, and the pickled bytes that the
driver received and sent.
"""

from __future__ import annotations

import argparse
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import ray
import torch
from unirl.core.roles import Transport, TransportPlace
from unirl.core.specs.part_config import PartConfig
from unirl.launchers.ray.ray_worker import SETTINGS
from unirl.transfer import tensor_store
from unirl.transfer.remote_rows import Piece, RemoteRows
from unirl.transports.transfer_queue import transport as transfer_queue
from unirl.transports.transfer_queue.config import TransferQueueConfig

ROW_KIB = (16, 256, 2048)
"""An image of the quickstart is 48 KiB, the trajectory of an SD3.5 sample of 1024 px some 2 MiB a stored latent."""
QUEUES = {
    "queue": TransferQueueConfig(),
    "mooncake": TransferQueueConfig(storage="mooncake", segment_mb=256, buffer_mb=128),
}
RUN = "data-plane"


class Process:
    """A worker with a transport of each kind."""

    def __init__(self, name: str, others: dict[str, Any], addresses: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

        def ask(owner: str, question: Any) -> Any:
            return [tensor.clone() for tensor in ray.get(others[owner].answer.remote(question))]

        def place(address: Any = None) -> TransportPlace:
            return TransportPlace(run=RUN, process=name, device="cpu", ask=ask, address=address)

        self._ways: dict[str, Transport] = {
            "reference": tensor_store.build(PartConfig(), place=place()),
            **{way: transfer_queue.build(QUEUES[way], place=place(address)) for way, address in addresses.items()},
        }
        self._tensor = torch.empty(0)

    def make(self, rows: int, row_bytes: int) -> float:
        """A tensor for the next rounds; returns its sum."""
        self._tensor = torch.arange(rows * row_bytes // 4, dtype=torch.float32).reshape(rows, -1) % 1000
        return float(self._tensor.double().sum())

    def value(self) -> torch.Tensor:
        return self._tensor

    def keep(self, way: str) -> RemoteRows:
        (name,) = self._ways[way].keep([self._tensor])
        rows, width = self._tensor.shape
        return RemoteRows([Piece(name, 0, rows)], row_shape=(width,), dtype=torch.float32)

    def total(self, way: str, rows: Any) -> float:
        """The sum of a received tensor, or of fetched rows."""
        tensor = rows if way == "value" else self._ways[way].fetch([rows])[0]
        return float(tensor.double().sum())

    def drop(self, way: str) -> None:
        self._ways[way].drop()

    def answer(self, question: Any) -> Any:
        return self._ways["reference"].answer(question)

    def close(self) -> None:
        for transport in self._ways.values():
            transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mooncake", action="store_true", help="needs the extra mooncake-cpu")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**30,
        runtime_env={"env_vars": dict(SETTINGS)},
    )
    place = TransportPlace(run=RUN, process="driver", device="cpu", ask=lambda process, question: None)
    ways = ["queue", *(["mooncake"] if options.mooncake else [])]
    drivers: dict[str, Transport] = {}
    try:
        for way in ways:
            drivers[way] = transfer_queue.build(QUEUES[way], place=place)
        measure(options, ["reference", *ways, "value"], {way: driver.address for way, driver in drivers.items()})
    finally:
        for driver in drivers.values():
            driver.close()
        ray.shutdown()


def measure(options: argparse.Namespace, ways: list[str], addresses: dict[str, Any]) -> None:
    remote: Any = ray.remote(num_cpus=0.5)(Process)
    maker = remote.remote("maker", {}, addresses)
    taker = remote.remote("taker", {"maker": maker}, addresses)
    print(f"{'tensor':>16} {'way':>10} {'trip':>10} {'MiB/s':>8} {'driver bytes':>14} {'per row':>10}")
    for kib in ROW_KIB:
        expected = ray.get(maker.make.remote(options.rows, kib * 1024))
        best: dict[str, tuple[float, int]] = {}
        for turn in range(options.rounds + 1):
            for way in ways:
                seconds, size, total = trip(maker, taker, way)
                assert total == expected, (way, total, expected)
                # The first round opens connections.
                if turn:
                    best[way] = min(best.get(way, (seconds, size)), (seconds, size))
        mib = options.rows * kib / 1024
        for way, (seconds, size) in best.items():
            name, rate = f"{options.rows} x {kib} KiB", mib / seconds
            per_row = size / options.rows
            print(f"{name:>16} {way:>10} {seconds * 1e3:7.1f} ms {rate:8.0f} {size:14d} {per_row:10.1f}")
    ray.get([maker.close.remote(), taker.close.remote()])


def trip(maker: Any, taker: Any, way: str) -> tuple[float, int, float]:
    """(seconds, bytes received and sent by the driver, sum of the received tensor)."""
    keep: Callable[[], Any] = maker.value.remote if way == "value" else lambda: maker.keep.remote(way)
    began = time.perf_counter()
    handle = ray.get(keep())
    total = ray.get(taker.total.remote(way, handle))
    seconds = time.perf_counter() - began
    if way != "value":
        ray.get(maker.drop.remote(way))
    return seconds, 2 * len(pickle.dumps(handle)), total


if __name__ == "__main__":
    main()
