"""Serialisation between driver and workers: pickled once, so that bytes are counted exactly."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

__all__ = ["packed", "unpacked"]


def packed(value: Any) -> bytes:
    """Pickle a value with its tensors on the CPU: the driver may lack the workers' devices."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Inverse of `packed`. Only for bytes from this run's own processes: it unpickles."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Stores tensors as bytes, dtype and shape; torch's own format adds 1 KB or more per tensor."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return NotImplemented
        here = obj.detach().cpu().contiguous()
        return _tensor, (here.reshape(-1).view(torch.uint8).numpy().tobytes(), here.dtype, tuple(here.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
