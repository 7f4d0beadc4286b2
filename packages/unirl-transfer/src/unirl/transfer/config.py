"""Settings of the transport `worker-store`."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.specs.part_config import PartConfig

__all__ = ["WorkerStoreConfig"]


@dataclass
class WorkerStoreConfig(PartConfig):
    """No settings: workers keep tensors in memory and pass them on through Ray's object store."""
