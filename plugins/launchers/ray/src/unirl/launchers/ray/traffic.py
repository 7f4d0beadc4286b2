"""Counts bytes through the driver and weight transfers to the engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

__all__ = ["Traffic"]


class Traffic:
    """Counts since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._samples = 0

    def sent(self, data: bytes) -> bytes:
        self._add("driver/sent_bytes", len(data))
        return data

    def received(self, data: bytes) -> bytes:
        self._add("driver/received_bytes", len(data))
        return data

    def media(self, tensors: Sequence[Tensor]) -> None:
        """Rows fetched to the driver: the images that trackers show."""
        self._add("driver/media_bytes", sum(tensor.nbytes for tensor in tensors))

    def made(self, samples: int) -> None:
        """Count generated samples."""
        with self._lock:
            self._samples += samples

    def synced(self, *, size_bytes: int, tensors: int, seconds: float) -> None:
        """Count one weight transfer, to one or several engines. size_bytes: everything sent, manifests included.

        tensors: of all engines.
        """
        self._add("sync/bytes", size_bytes)
        self._add("sync/tensors", tensors)
        self._add("sync/seconds", seconds)

    def take(self) -> dict[str, float]:
        """The counts since the last call, and the driver's bytes per sample, excluding displayed media."""
        with self._lock:
            counts, samples = self._counts, self._samples
            self._counts, self._samples = {}, 0
        carried = counts.get("driver/sent_bytes", 0.0) + counts.get("driver/received_bytes", 0.0)
        return {**counts, **({"driver/bytes_per_sample": carried / samples} if samples else {})}

    def _add(self, name: str, amount: float) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + amount
