"""Bytes of tensors that are alive, counted by their storages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """The most bytes that tensors took at any time inside the block, `peak`, and those of now, `live`.

    Exact and the same on any machine: every storage that an operation reads or makes is counted once, until its last
    tensor is gone, with the bytes that it has now: FSDP2 empties the storages of gathered weights and keeps their tensors.
    Resident memory would also count pages of mapped checkpoint files, and what malloc has not returned.
    """

    def __init__(self, *, without: Collection[int] = ()) -> None:
        """without: storages that are not counted, by `_cdata`."""
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._without = without
        self._at_most = 0
        self.peak = 0

    @property
    def live(self) -> int:
        self._recount()
        return self._at_most

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count these: made where this does not look."""
        self.count(references(tensors))

    def count(self, storages: Mapping[int, StorageWeakRef]) -> None:
        """Like `note`, for the `references` of tensors."""
        for key, ref in storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None and key not in self._without:
                self._seen.setdefault(key, ref)
                self._at_most += storage.nbytes() - self._sizes.get(key, 0)
                self._sizes[key] = storage.nbytes()
        # Storages that have gone or shrunk since they were counted are in the sum: below the peak it makes no other.
        if self._at_most > self.peak:
            self._recount()
            self.peak = max(self.peak, self._at_most)

    def _recount(self) -> None:
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._seen.items()}
        self._sizes = {key: storage.nbytes() for key, storage in storages.items() if storage is not None}
        self._seen = {key: self._seen[key] for key in self._sizes}
        self._at_most = sum(self._sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the shards
        result = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        return result


def references(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    """Storages of tensors, which do not keep them alive; of sharded ones, this rank's."""
    locals_ = (part for tensor in tensors for part in stored(tensor))
    # Shapes take no memory.
    storages = (x.untyped_storage() for x in locals_ if x.device.type != "meta" and not isinstance(x, FakeTensor))
    return {storage._cdata: StorageWeakRef(storage) for storage in storages}


def stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor stores its values in: itself, this rank's shard, or codes and scales of a quantized one."""
    if isinstance(tensor, DTensor):
        return stored(tensor._local_tensor)
    if not is_traceable_wrapper_subclass(tensor) or isinstance(tensor, FakeTensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in stored(getattr(tensor, name))]
