"""Settings of the TransferQueue transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["TransferQueueConfig"]


@dataclass
class TransferQueueConfig(PartConfig):
    """Where samples are stored between the worker that produces them and the one that consumes them."""

    storage: str = one_of("simple", "mooncake", default="simple")
    """`simple`: in storage processes that the run starts, spread over its machines. `mooncake`: in a Mooncake store."""
    units: int = limit(1, least=1)
    """Number of storage processes, for `simple`; use two or more per machine if rollouts are large."""
    master: str = ""
    """`host:port` of a running Mooncake master; empty starts one for this run on the driver's machine."""
    protocol: str = one_of("tcp", "rdma", default="tcp")
    """Mooncake's transfer protocol: `tcp` or `rdma`."""
    rdma_devices: str = ""
    """Devices for `rdma`, such as `mlx5_0,mlx5_1`; empty leaves the choice to Mooncake."""
    segment_mb: int = limit(1024, least=1)
    """Memory that each worker contributes to the Mooncake store, in MiB; the sum must hold a rollout."""
    buffer_mb: int = limit(256, least=1)
    """Transfer buffer of each worker, for Mooncake, in MiB."""
    start_timeout_s: float = limit(120.0, above=0)
    """Maximum time for the processes that the run starts to come up, in seconds."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Settings of another storage or protocol, and an invalid address."""
        if self.master and not self.master.rpartition(":")[2].isdigit():
            yield Reason(key=".master", text=f"got {self.master!r}, expected host:port.")
        if self.storage != "mooncake":
            defaults = TransferQueueConfig()
            for key in ("master", "protocol", "rdma_devices"):
                if (value := getattr(self, key)) != getattr(defaults, key):
                    yield Reason(key=f".{key}", text=f"got {value!r}, which needs transport.storage=mooncake.")
        elif self.rdma_devices and self.protocol != "rdma":
            yield Reason(key=".rdma_devices", text=f"got {self.rdma_devices!r}, which needs transport.protocol=rdma.")
