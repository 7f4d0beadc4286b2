"""The checksum of a set of weights, which a trainer sends and an engine returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..names import did_you_mean
from .array import Array

__all__ = ["MadeTensors", "checksum", "forms", "joined", "tensor_digest", "tensor_digests", "weight_mismatch"]


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
    """32 hex digits, BLAKE2b of one tensor with its name, dtype and shape.

    Bytes are those of the contiguous tensor; device and memory layout do not count.
    """
    import torch

    part = hashlib.blake2b(digest_size=16)
    shape = ",".join(str(size) for size in tensor.shape)
    # Lengths first, so that no name can be taken for the start of another's dtype.
    part.update(f"{len(name)}:{name}:{str(tensor.dtype).removeprefix('torch.')}:{shape}:".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        part.update(flat.view(torch.uint8).numpy().data)
    return part.hexdigest()


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
