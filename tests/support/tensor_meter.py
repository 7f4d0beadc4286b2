"""Bytes of tensors that are alive, counted by their storages."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """The most bytes that tensors took at any time inside the block, `peak`, and those of now, `live`.

    Exact and the same on any machine: every storage that an operation reads or makes is counted once, until its last
    tensor is gone, with the bytes that it has now: FSDP2 empties the storages of gathered weights and keeps their tensors.
    Resident memory would also count pages of mapped checkpoint files, and what malloc has not returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._at_most = 0
        self.peak = 0

    @property
    def live(self) -> int:
        self._count()
        return self._at_most

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count these: made on other threads, where this does not look."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            # Shapes take no memory.
            if local.device.type != "meta" and not isinstance(local, FakeTensor):
                storage = local.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._seen:
                    self._seen[key] = StorageWeakRef(storage)
                self._at_most += size - self._sizes.get(key, 0)
                self._sizes[key] = size
        # Storages that have gone or shrunk since they were counted are in the sum: below the peak it makes no other.
        if self._at_most > self.peak:
            self._count()
            self.peak = max(self.peak, self._at_most)

    def _count(self) -> None:
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._seen.items()}
        self._sizes = {key: storage.nbytes() for key, storage in storages.items() if storage is not None}
        self._seen = {key: self._seen[key] for key in self._sizes}
        self._at_most = sum(self._sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the shards
        result = func(*args, **(kwargs or {}))
        self.note([leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)])
        return result
