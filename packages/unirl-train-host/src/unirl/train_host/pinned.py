"""CPU memory that a GPU copies to and from by itself."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.errors import RunFailed

__all__ = ["pin"]


def pin(memory: Tensor, *, key: str, instead: str) -> None:
    """Lock the pages of a memory. torch's `pin_memory` would take the next power of two of its size.

    Raises RunFailed, with the key that asked for it and another value of that, where the system refuses.
    """
    runtime: Any = cast("Any", torch.cuda).cudart()
    place = memory.data_ptr()
    # 1: for all contexts, as torch's own staging of checkpoints does.
    if memory.nbytes and (code := int(runtime.cudaHostRegister(place, memory.nbytes, 1))):
        raise RunFailed(
            f"{key}: {memory.nbytes / 2**20:.0f} MiB of CPU memory cannot be pinned (CUDA error {code}). See whether "
            f"`ulimit -l` or the container limits locked memory, or use {instead}."
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, place)
