"""Metadata of a transfer: dtype, shape and checksum of every tensor, and their assignment to buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightUpdate
from unirl.core.types.weights import forms, joined, tensor_digests

__all__ = ["BUCKET_BYTES", "Manifest", "TensorInfo", "plan_transfer"]

BUCKET_BYTES = 256 * 2**20
"""Bucket size in bytes: large enough to amortise latency, small enough to be held twice."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a transfer."""

    name: str
    dtype: str
    """torch's name without the `torch.` prefix."""
    shape: tuple[int, ...]
    digest: str
    """`unirl.core.types.weights.tensor_digest`, computed by the sender."""

    @property
    def size_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Sent before any data. An incompatible receiver rejects it before changing anything."""

    version: int
    kind: Literal["full", "lora", "merged"]
    adapter: str
    adapter_scale: float
    tensors: tuple[TensorInfo, ...]
    """Tensors, sorted by name."""
    buckets: tuple[tuple[str, ...], ...]
    """Tensor names of each bucket, in byte order."""
    checksum: str
    """`unirl.core.types.weights.checksum` of all tensors."""

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors)

    def info(self, name: str) -> TensorInfo:
        return next(info for info in self.tensors if info.name == name)


def plan_transfer(update: WeightUpdate, *, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    """The manifest of an update.

    bucket_bytes: a larger tensor gets its own bucket.
    Raises RecipeError for an update without tensors, or a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise RecipeError(f"weights.bucket_bytes: got {bucket_bytes}, expected 1 or more.")
    if not update.tensors:
        raise RecipeError(
            f"weights: the {update.kind} update of version {update.version} has no tensors: there are no trainable "
            "parameters."
        )
    tensors = forms(update.tensors)
    digests = update.digests or tensor_digests(update.tensors)
    assert digests.keys() == tensors.keys(), "digests of an update are for other tensors"
    infos = tuple(
        TensorInfo(
            name=name,
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            shape=tuple(tensors[name].shape),
            digest=digests[name],
        )
        for name in sorted(tensors)
    )
    return Manifest(
        version=update.version,
        kind=update.kind,
        adapter=update.adapter,
        adapter_scale=update.adapter_scale,
        tensors=infos,
        buckets=_buckets(infos, bucket_bytes),
        checksum=joined(info.digest for info in infos),
    )


def pack(bucket: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a bucket, one uint8 tensor on the device of the tensors."""
    parts = [tensors[name].detach().contiguous().reshape(-1).view(torch.uint8) for name in bucket]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unpack(manifest: Manifest, bucket: Sequence[str], data: Tensor) -> dict[str, Tensor]:
    """The tensors of a bucket, as copies. data: [bytes] uint8.

    Raises ValueError when the number of bytes differs from the manifest's.
    """
    infos = [manifest.info(name) for name in bucket]
    expected = sum(info.size_bytes for info in infos)
    if data.numel() != expected:
        raise ValueError(f"got {data.numel()} bytes, expected a bucket of {expected} ({', '.join(bucket)})")
    result: dict[str, Tensor] = {}
    start = 0
    for info in infos:
        # A copy: a view may be misaligned for its dtype, and would keep the whole bucket alive.
        piece = data[start : start + info.size_bytes].clone()
        result[info.name] = piece.view(torch_dtype(info.dtype)).reshape(info.shape)
        start += info.size_bytes
    return result


def torch_dtype(name: str) -> torch.dtype:
    """The dtype with this name. Raises ValueError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def _buckets(infos: Sequence[TensorInfo], limit: int) -> tuple[tuple[str, ...], ...]:
    buckets: list[list[str]] = []
    filled = limit
    for info in infos:
        if filled + info.size_bytes > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(info.name)
        filled += info.size_bytes
    return tuple(tuple(bucket) for bucket in buckets)
