"""The checksum of a set of weights, which a trainer sends and an engine returns."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..names import did_you_mean
from .array import Array

__all__ = [
    "MadeTensors",
    "checksum",
    "fingerprint",
    "forms",
    "joined",
    "tensor_digest",
    "tensor_digests",
    "weight_mismatch",
]


WORDS_PER_ROW = 4096
"""Words of a tensor that `fingerprint` adds up at once."""


class MadeTensors(Mapping[str, Array]):
    """Tensors by name that are made on each access and not kept, for weights larger than one device.

    Where making one is collective, all ranks access the same ones in the same order. Accessing one twice makes it
    twice: go through `items()` once, and look at dtypes and shapes through `forms`.
    """

    def __init__(self, make: Mapping[str, Callable[[], Array]], *, forms: Mapping[str, Array]) -> None:
        """make: of each tensor.  forms: a tensor of the same dtype and shape on the meta device, by the same names."""
        assert make.keys() == forms.keys(), "forms are of other tensors"
        self._make, self.forms = dict(make), dict(forms)

    def __getitem__(self, name: str) -> Array:
        return self._make[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


def forms(tensors: Mapping[str, Array]) -> Mapping[str, Array]:
    """Tensors of the same names, dtypes and shapes, to look at nothing else; no tensor is made for it."""
    return tensors.forms if isinstance(tensors, MadeTensors) else tensors


def checksum(tensors: Mapping[str, Array]) -> str:
    """32 hex digits that change with any bit, name, shape or dtype of the tensors, and with nothing else.

    `joined` over the `tensor_digest` of each tensor, in the order of their names.
    """
    return joined(tensor_digests(tensors).values())


def tensor_digests(tensors: Mapping[str, Array]) -> dict[str, str]:
    """Name -> `tensor_digest` of every tensor, in the order of their names."""
    return {name: tensor_digest(name, tensors[name]) for name in sorted(tensors)}


def joined(digests: Iterable[str]) -> str:
    """The checksum of tensors whose digests were made apart. digests: in the order of the tensors' names."""
    whole = hashlib.blake2b(digest_size=16)
    for digest in digests:
        whole.update(bytes.fromhex(digest))
    return whole.hexdigest()


def tensor_digest(name: str, tensor: Array) -> str:
    """32 hex digits of one tensor with its name, dtype and shape: BLAKE2b of these and of its `fingerprint`.

    Bytes are those of the contiguous tensor; device and memory layout do not count. Computed where the tensor lies.
    """
    part = hashlib.blake2b(digest_size=16)
    shape = ",".join(str(size) for size in tensor.shape)
    # Lengths first, so that no name can be taken for the start of another's dtype.
    part.update(f"{len(name)}:{name}:{str(tensor.dtype).removeprefix('torch.')}:{shape}:".encode())
    part.update(fingerprint(tensor).to_bytes(8, "little"))
    return part.hexdigest()


def fingerprint(tensor: Array) -> int:
    """A number below 2^64 of the bytes of a contiguous tensor, the same on every device.

    Sums of 32-bit words times fixed odd factors mod 2^64 (multilinear hashing: Lemire and Kaser, arXiv 1202.4961), of
    each `WORDS_PER_ROW` words, then of these sums, until one is left. A change of one word always changes it; any other
    one leaves it with a probability of about 2^-64. It finds errors, not forgeries.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return 0
    factors = _factors(str(flat.device))
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words: Any = flat.view(torch.int32)
    # Products are twice as large as words: such as fit in the cache of a core, and as keep a device busy.
    rows = 16 if flat.device.type == "cpu" else 1024
    while True:
        sums = torch.cat([_row_sums(part, factors) for part in words.split(WORDS_PER_ROW * rows)])
        if len(sums) == 1:
            return int(sums) % 2**64
        words = sums.view(torch.int32)


def _row_sums(words: Array, factors: Array) -> Array:
    """[ceil(n / WORDS_PER_ROW)] int64, of words [n] int32; those that are missing in the last row are 0."""
    import torch

    whole = len(words) // WORDS_PER_ROW * WORDS_PER_ROW
    sums = (words[:whole].view(-1, WORDS_PER_ROW).to(torch.int64) * factors).sum(dim=1)
    if whole == len(words):
        return sums
    rest = words[whole:].to(torch.int64)
    return torch.cat([sums, (rest * factors[: len(rest)]).sum().reshape(1)])


@functools.cache
def _factors(device: str) -> Array:
    """[WORDS_PER_ROW] int64 on a device: numbers of the generator SplitMix64 with seed 0, made odd."""
    import numpy as np
    import torch

    state = np.arange(1, WORDS_PER_ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.tensor(state.view(np.int64), device=device)


class Described(Protocol):
    """Properties of a tensor, or of a description of one, to compare."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Any: ...


def weight_mismatch(sent: Mapping[str, Described], held: Mapping[str, Described]) -> str:
    """Why weights that were sent do not fit those that are held: names, then dtypes and shapes; empty when they do."""
    unknown, missing = sorted(sent.keys() - held.keys()), sorted(held.keys() - sent.keys())
    if sent and len(unknown) == len(sent):
        return (
            f"none of the {len(sent)} tensors sent is known here: {unknown[0]!r} was sent, "
            f"{min(held, default='nothing')!r} is held{did_you_mean(unknown[0], held)} A prefix differs, or the model."
        )
    if unknown:
        hint = did_you_mean(unknown[0], held) or "."
        return f"{len(unknown)} of {len(sent)} tensors are unknown here, such as {unknown[0]!r}{hint}"
    if missing:
        return (
            f"{len(sent)} tensors were sent, which leaves out {len(missing)} that are held, such as {missing[0]!r}; "
            "they would stay of an older version."
        )
    for name in sorted(sent):
        there, here = _described(sent[name]), _described(held[name])
        if there != here:
            return (
                f"{name!r} is sent as {there}; {here} is held. Send it in the dtype and shape of the receiver, or load "
                "both from the same checkpoint."
            )
    return ""


def _described(tensor: Described) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
