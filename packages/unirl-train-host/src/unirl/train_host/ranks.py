"""The training processes and their device mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from unirl.core.errors import RecipeError, RunFailed

__all__ = ["Ranks", "groups_left_on_error"]

_own_group_users = 0
"""Backends of this process that use the single-process group that one of them made."""


@contextmanager
def groups_left_on_error() -> Iterator[None]:
    """A group that was created inside the block is left when the block raises, as `Ranks.close` leaves it."""
    before = _own_group_users
    try:
        yield
    except BaseException:
        _release(_own_group_users - before)
        raise


def _release(users: int) -> None:
    """So many fewer users of the group that was created here; without any it is destroyed."""
    global _own_group_users
    _own_group_users -= users
    if users and not _own_group_users and dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The default process group, or this process alone, as a mesh of replicas x shards x tensor-parallel ranks.

    An existing group is used. Under torchrun one is created from its environment. Otherwise, where FSDP needs one, a
    single-process group is created on an in-memory store, which needs no port.

    Neighbouring ranks share a tensor slice first, then a copy: rank = (replica x shards + shard) x tensor + slice.
    Ranks of one tensor-parallel group get the same samples, and so do the neighbours of one sequence, which hold
    different shards of the weights.
    """

    def __init__(
        self, device: torch.device, *, needs_group: bool, shard: int = 0, tensor: int | None = None, sequence: int = 1
    ) -> None:
        """shard, tensor, sequence: as the backend's `mesh` has them; tensor is None where it has no such axis."""
        global _own_group_users
        if device.type == "cuda" and device.index is not None:
            # FSDP and NCCL use the current device.
            torch.cuda.set_device(device)
        self.device = device
        self._owns = False
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        if not dist.is_initialized():
            if dist.is_torchelastic_launched():
                dist.init_process_group(backend)
            elif needs_group:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
                self._owns = True
        elif _own_group_users:
            self._owns = True
        _own_group_users += self._owns
        self.is_grouped = dist.is_initialized()
        self.rank = dist.get_rank() if self.is_grouped else 0
        world = dist.get_world_size() if self.is_grouped else 1
        of_holders = "ranks" if tensor is None else f"ranks / mesh.tensor {tensor}"
        tensor = tensor or 1
        self.num_tensor, self.num_sequence = tensor, sequence
        holders = self._divided(world, tensor, "tensor", "ranks")
        self.num_ranks = self._divided(holders, sequence, "sequence", of_holders)
        """Data-parallel ranks: those with different samples."""
        num_shards = shard or holders
        num_replicas = self._divided(holders, num_shards, "shard", of_holders)
        self._sizes = (num_replicas, num_shards, tensor)
        self._mesh: DeviceMesh | None = None
        self._rows_group: dist.ProcessGroup | None = None
        if tensor > 1:
            self._rows_group = self.mesh["replicate", "shard"]._flatten("rows").get_group()
        self._background_group: dist.ProcessGroup | None = None
        self._sequences: DeviceMesh | None = None
        if sequence > 1:
            sizes, dims = (self.num_ranks, sequence), ("rows", "sequence")
            self._sequences = init_device_mesh(device.type, sizes, mesh_dim_names=dims)
            self._rows_group = self._sequences.get_group("rows")

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks, with the dims `replicate`, `shard` and `tensor`; unused dims are left out."""
        if self._mesh is None:
            names = ("replicate", "shard", "tensor")
            kept = [i for i in range(3) if names[i] == "shard" or self._sizes[i] > 1 or self.num_tensor > 1]
            sizes, dims = tuple(self._sizes[i] for i in kept), tuple(names[i] for i in kept)
            self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=dims)
        return self._mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over: one sharded copy (FSDP), or several (HSDP)."""
        if self._sizes[0] > 1:
            return self.mesh["replicate", "shard"]
        return self.mesh["shard"] if self.num_tensor > 1 else self.mesh

    @property
    def tensor_mesh(self) -> DeviceMesh:
        return self.mesh["tensor"]

    @property
    def sequence_mesh(self) -> DeviceMesh:
        """The ranks of this rank's sequence."""
        assert self._sequences is not None, "mesh.sequence is 1"
        return self._sequences["sequence"]

    @property
    def background_group(self) -> dist.ProcessGroup | None:
        """All ranks, for a thread beside the one that trains: calls of two threads on one group would mix. None where
        there is no group. Collective."""
        if self.is_grouped and self._background_group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank is in it"
            self._background_group = group
        return self._background_group

    def check_same_rows(self, sample_ids: Iterable[str]) -> None:
        """Raise RunFailed on all ranks that share the work on each sample, unless all have these samples. Collective.

        Without this check an exchange would mix the tokens of different samples.
        """
        if self.num_tensor * self.num_sequence == 1:
            return
        group = self.tensor_mesh.get_group() if self.num_tensor > 1 else self.sequence_mesh.get_group()
        text = "\n".join(sample_ids)
        # 48 bits, which fp64 holds exactly, as `all_reduce` of a device's backend may not take int64.
        digest = float(int.from_bytes(sha256(text.encode()).digest()[:6], "big"))
        both = torch.tensor([digest, -digest], dtype=torch.float64, device=self.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        if both[0] != -both[1]:
            raise RunFailed(
                f"backend.mesh: rank {self.rank} has the samples {text[:60].splitlines()}..., and another rank of its "
                "group has others. Ranks that share a sample (mesh.tensor, mesh.sequence) must get the same ones: give "
                "each group of neighbouring ranks one share of the rows."
            )

    def all_reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """values: fp64 on the CPU. Returns the same shape, reduced over the data-parallel ranks."""
        if self.num_ranks == 1:
            return values
        joined = values.to(self.device, copy=True)
        dist.all_reduce(joined, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group=self._rows_group)
        return joined.cpu()

    @torch.no_grad()
    def average_gradients(self, params: Iterable[Tensor]) -> None:
        """Average the gradients of parameters of which every rank has its own copy, in place. Collective.

        A parameter without gradient counts as 0, and keeps none where no rank has one.
        """
        if self.num_ranks == 1:
            return
        copies = list(params)
        has_gradient = torch.tensor([float(param.grad is not None) for param in copies], device=self.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._rows_group)
        reduced = [param for param, has in zip(copies, has_gradient.tolist(), strict=True) if has]
        if not reduced:
            return
        for param in reduced:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = [param.grad for param in reduced if param.grad is not None]
        # In one call: an adapter by itself is too small for the network.
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=self._rows_group)
        flat /= self.num_ranks
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    def close(self) -> None:
        """Leave the group; the last user of a group created here destroys it."""
        group, self._background_group = self._background_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        _release(int(self._owns))
        self._owns = False

    def _divided(self, ranks: int, by: int, key: str, of: str) -> int:
        if by < 1 or ranks % by:
            raise RecipeError(
                f"backend.mesh.{key}: got {by}, but {ranks} ({of}) is not divisible by it. Start a multiple of "
                f"{by} processes, or choose a divisor of {ranks}."
            )
        return ranks // by
