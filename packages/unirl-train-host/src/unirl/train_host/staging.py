"""Copies of tensors in CPU memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .pinned import pin
from .sharding import local

__all__ = ["Staging"]

ALIGNMENT = 64
"""Bytes at which each copy begins."""


class Staging:
    """One memory for the copies of all tensors, used again from checkpoint to checkpoint.

    torch's `DefaultStager` keeps a buffer for each storage: it takes milliseconds for each DTensor, and has to pin
    memory again after weights were moved off the device and back.
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the tensors; the memory is pinned where that is a GPU."""
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copies(self, sets: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The tensors of each set with this rank's elements in CPU memory, complete on return.

        Valid until the next call. Raises RunFailed if the memory cannot be pinned.
        """
        given = [dict(tensors) for tensors in sets]
        size = sum(_size(local(tensor)) for tensors in given for tensor in tensors.values())
        if size > len(self._memory):
            self.free()
            self._memory = torch.empty(size, dtype=torch.uint8)
            if self._device.type == "cuda":
                pin(self._memory, key="run.save_async", instead="false")
        start = 0

        def copied(tensor: Tensor) -> Tensor:
            nonlocal start
            if isinstance(tensor, DTensor):
                return _rebuilt(tensor, "_local_tensor", copied(tensor.to_local()))
            if not (size := _size(tensor)):
                return tensor.detach().to("cpu", copy=True)
            memory, start = self._memory[start : start + tensor.nbytes], start + size
            # The strides of a copy of its own.
            strides = torch.empty_like(tensor, device="meta").stride()
            return memory.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor, non_blocking=True)

        result = [{name: copied(tensor) for name, tensor in tensors.items()} for tensors in given]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return result

    def free(self) -> None:
        """Release the memory, once nothing refers to the copies."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def _size(tensor: Tensor) -> int:
    """Bytes of its copy; 0 for a tensor that is made of others, such as 8-bit moments: torch writes all memory that
    one of these shares."""
    return 0 if is_traceable_wrapper_subclass(tensor) else -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _rebuilt(tensor: Any, name: str, part: Tensor) -> Tensor:
    """A tensor that is made of others with another one in the place of one of them."""
    names, context = tensor.__tensor_flatten__()
    parts = {**{name: getattr(tensor, name) for name in names}, name: part}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
