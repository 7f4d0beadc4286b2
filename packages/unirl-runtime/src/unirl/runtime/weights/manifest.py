"""What is about to be sent: every tensor with its dtype, shape and checksum, and the buckets that they travel in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import WeightUpdate
from unirl.core.weights import joined, tensor_digest

__all__ = ["BUCKET_BYTES", "Manifest", "TensorInfo", "plan_transfer"]

BUCKET_BYTES = 256 * 2**20
"""Bytes of a bucket: large enough that latency does not count, small enough to be held twice."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a transfer."""

    name: str
    dtype: str
    """As torch prints it, without `torch.`."""
    shape: tuple[int, ...]
    digest: str
    """`unirl.core.weights.tensor_digest`, made where the tensor is sent from."""

    @property
    def size_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Sent before any bytes. A receiver that cannot take it says so before anything of it changes."""

    version: int
    kind: Literal["full", "lora", "merged"]
    adapter: str
    adapter_scale: float
    tensors: tuple[TensorInfo, ...]
    """By name."""
    buckets: tuple[tuple[str, ...], ...]
    """Names of the tensors of each bucket, in the order in which their bytes follow each other."""
    checksum: str
    """Of all tensors, `unirl.core.weights.checksum`."""

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors)

    def info(self, name: str) -> TensorInfo:
        return next(info for info in self.tensors if info.name == name)


def plan_transfer(
    update: WeightUpdate, *, bucket_bytes: int = BUCKET_BYTES, names: Mapping[str, str] | None = None
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest of an update, and its tensors by the names that the receiver knows.

    names: ours -> theirs, a bijection that covers every tensor.  bucket_bytes: a larger tensor has a bucket to itself.
    Raises RecipeError for an update without tensors, a map that loses or joins names, or a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise RecipeError(f"weights.bucket_bytes: {bucket_bytes} was asked for; it must be 1 or more.")
    if not update.tensors:
        raise RecipeError(
            f"weights: the {update.kind} update of version {update.version} has no tensors: nothing trains, or the "
            "names that were to be sent matched nothing."
        )
    tensors = _renamed(update.tensors, names) if names is not None else dict(update.tensors)
    infos = tuple(
        TensorInfo(
            name=name,
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            shape=tuple(tensors[name].shape),
            digest=tensor_digest(name, tensors[name]),
        )
        for name in sorted(tensors)
    )
    manifest = Manifest(
        version=update.version,
        kind=update.kind,
        adapter=update.adapter,
        adapter_scale=update.adapter_scale,
        tensors=infos,
        buckets=_buckets(infos, bucket_bytes),
        checksum=joined(info.digest for info in infos),
    )
    return manifest, tensors


def pack(manifest: Manifest, bucket: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a bucket, one uint8 tensor where the tensors are."""
    parts = [tensors[name].detach().contiguous().reshape(-1).view(torch.uint8) for name in bucket]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unpack(manifest: Manifest, bucket: Sequence[str], data: Tensor) -> dict[str, Tensor]:
    """The tensors of a bucket, as copies of their own. data: [bytes] uint8.

    Raises ValueError when there are more or fewer bytes than the manifest says.
    """
    infos = [manifest.info(name) for name in bucket]
    expected = sum(info.size_bytes for info in infos)
    if data.numel() != expected:
        raise ValueError(f"a bucket of {expected} bytes was announced ({', '.join(bucket)}); {data.numel()} came")
    found: dict[str, Tensor] = {}
    start = 0
    for info in infos:
        # A copy: a view may lie on bytes that its dtype cannot be read from, and would keep the whole bucket alive.
        piece = data[start : start + info.size_bytes].clone()
        found[info.name] = piece.view(torch_dtype(info.dtype)).reshape(info.shape)
        start += info.size_bytes
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name. Raises ValueError for one that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
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


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    missing = sorted(tensors.keys() - names.keys())
    if missing:
        raise RecipeError(
            f"weights: the engine's name map has no entry for {len(missing)} of {len(tensors)} tensors, such as "
            f"{missing[0]!r}; they would stay as they were. Complete the map."
        )
    renamed: dict[str, Tensor] = {}
    for ours in tensors:
        theirs = names[ours]
        if theirs in renamed:
            twice = sorted(name for name in tensors if names[name] == theirs)
            raise RecipeError(f"weights: the name map gives {theirs!r} to {twice}; one of them would be lost.")
        renamed[theirs] = tensors[ours]
    return renamed
