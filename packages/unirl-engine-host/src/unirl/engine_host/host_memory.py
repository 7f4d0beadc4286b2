"""Releases the memory of tensors on a CPU while an engine sleeps, as allocators of engines do on CUDA.

Copied along with the server's source; imports only torch and NumPy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["ReleasedMemory"]


class ReleasedMemory:
    """Storages without memory. Their tensors, and all views of these, exist, but may not be used until `restore`."""

    def __init__(self, *, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Release the memory of these tensors. kept: their content goes to a temporary file.  dropped: their content is
        lost; they are zeros afterwards.

        Raises RuntimeError for a tensor whose memory is not torch's own, before any is released.
        """
        keeps, drops = _storages(kept), _storages(dropped)
        self._kept = list(keeps.values())
        self._dropped = [storage for address, storage in drops.items() if address not in keeps]
        for storage in (*self._kept, *self._dropped):
            if not storage.resizable():
                raise RuntimeError(f"the memory of a tensor of {storage.nbytes()} bytes cannot be released.")
        self._sizes = [storage.nbytes() for storage in (*self._kept, *self._dropped)]
        self._file: Any = tempfile.TemporaryFile(prefix="unirl-asleep-")  # noqa: SIM115 - open until it is restored
        for storage in self._kept:
            # A copy: memory that NumPy has seen cannot be released.
            _bytes(storage).clone().numpy().tofile(self._file)
        self._file.flush()
        for storage in (*self._kept, *self._dropped):
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes released."""
        return sum(self._sizes)

    def restore(self) -> None:
        """Allocate the memory again, with the content that was kept."""
        for storage, size in zip((*self._kept, *self._dropped), self._sizes, strict=True):
            storage.resize_(size)
        self._file.seek(0)
        for storage in self._kept:
            _bytes(storage).copy_(torch.from_numpy(np.fromfile(self._file, dtype=np.uint8, count=storage.nbytes())))
        for storage in self._dropped:
            _bytes(storage).zero_()
        self._file.close()


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Address -> each storage once; tensors that are tied or views share one. Empty ones have no memory."""
    storages = (tensor.detach().untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
