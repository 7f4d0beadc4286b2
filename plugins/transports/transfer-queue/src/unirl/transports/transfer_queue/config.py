"""Settings of the TransferQueue transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["TransferQueueConfig", "problems"]


@dataclass
class TransferQueueConfig(PartConfig):
    """Where rows lie between the worker that makes them and the one that needs them."""

    storage: str = "simple"
    """`simple`: in processes that the run starts, spread over its machines. `mooncake`: in a Mooncake store."""
    units: int = 1
    """Processes that hold rows, with `simple`; two or more per machine where rollouts are large."""
    master: str = ""
    """`host:port` of a Mooncake master that runs already; empty starts one beside the driver for the run."""
    protocol: str = "tcp"
    """How Mooncake moves bytes: `tcp` or `rdma`."""
    rdma_devices: str = ""
    """Devices for `rdma`, such as `mlx5_0,mlx5_1`; empty leaves the choice to Mooncake."""
    segment_mb: int = 1024
    """Memory that each worker gives to the Mooncake store, in MiB; together they must hold a rollout."""
    buffer_mb: int = 256
    """Memory of each worker for bytes on their way, with Mooncake, in MiB."""
    start_timeout_s: float = 120.0
    """Longest time for what the run starts to come up."""


def problems(config: TransferQueueConfig) -> Iterator[str]:
    """What is wrong with these settings, each one sentence with the key path first."""
    for key, value, allowed in (
        ("storage", config.storage, ("simple", "mooncake")),
        ("protocol", config.protocol, ("tcp", "rdma")),
    ):
        if value not in allowed:
            yield f"transport.{key}: {value!r} was asked for; it is one of {', '.join(allowed)}."
    for key, number in (("units", config.units), ("segment_mb", config.segment_mb), ("buffer_mb", config.buffer_mb)):
        if number < 1:
            yield f"transport.{key}: {number} was asked for; it must be 1 or more."
    if config.start_timeout_s <= 0:
        yield f"transport.start_timeout_s: {config.start_timeout_s} was asked for; it must be above 0."
    if config.master and not config.master.rpartition(":")[2].isdigit():
        yield f"transport.master: {config.master!r} was asked for; it reads host:port."
    if config.storage != "mooncake":
        defaults = TransferQueueConfig()
        for key, value, default in (
            ("master", config.master, defaults.master),
            ("protocol", config.protocol, defaults.protocol),
            ("rdma_devices", config.rdma_devices, defaults.rdma_devices),
        ):
            if value != default:
                yield f"transport.{key}: {value!r} was asked for; it needs transport.storage=mooncake."
    elif config.rdma_devices and config.protocol != "rdma":
        yield f"transport.rdma_devices: {config.rdma_devices!r} was asked for; it needs transport.protocol=rdma."
