"""The checksum of a set of weights: what a trainer sends and an engine answers with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from .array import Array

__all__ = ["checksum"]


def checksum(tensors: Mapping[str, Array]) -> str:
    """32 hex digits that change with any bit, name, shape or dtype of the tensors, and with nothing else.

    The BLAKE2b of the BLAKE2b of each tensor, in the order of their names: the parts can be made where the tensors
    are, in any order, and joined. Bytes are those of the contiguous tensor; device and memory layout do not count.
    """
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        whole.update(_digest(name, tensors[name]))
    return whole.hexdigest()


def _digest(name: str, tensor: Array) -> bytes:
    import torch

    part = hashlib.blake2b(digest_size=16)
    shape = ",".join(str(size) for size in tensor.shape)
    # Lengths first, so that no name can be taken for the start of another's dtype.
    part.update(f"{len(name)}:{name}:{str(tensor.dtype).removeprefix('torch.')}:{shape}:".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        part.update(flat.view(torch.uint8).numpy().data)
    return part.digest()
