"""What goes between the driver and a worker, as bytes: pickled once, counted exactly."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

__all__ = ["packed", "unpacked"]


def packed(value: Any) -> bytes:
    """A value with its tensors on the CPU, for a driver need not have the workers' devices."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """What `packed` was given. For bytes of this run's own processes only: it is a pickle."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """torch writes a file of 1 KB or more around the smallest tensor; here it is its bytes, dtype and shape."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return NotImplemented
        here = obj.detach().cpu().contiguous()
        return _tensor, (here.reshape(-1).view(torch.uint8).numpy().tobytes(), here.dtype, tuple(here.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
