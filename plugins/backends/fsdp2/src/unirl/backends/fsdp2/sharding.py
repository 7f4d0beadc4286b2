"""Ranks and sharding: the process group, which modules are wrapped, and whole tensors from shards."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from unirl.core.errors import RecipeError

__all__ = ["Ranks", "find_blocks", "full", "local", "recompute", "reshard", "shard"]

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

_own_group_users = 0
"""Backends of this process that use the single-process group that one of them made."""


class Ranks:
    """The processes that train together: the default process group, or this process alone.

    A group that exists is used; under torchrun one is made from its environment; otherwise, where FSDP needs one, a
    group of this process alone, on a store in memory, so that there is no port to collide on.
    """

    def __init__(self, device: torch.device, *, needs_group: bool) -> None:
        global _own_group_users
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
        self.num_ranks = dist.get_world_size() if self.is_grouped else 1
        self.rank = dist.get_rank() if self.is_grouped else 0

    def all_reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """values: fp64 on the CPU. Returns the same shape, joined over the ranks."""
        if self.num_ranks == 1:
            return values
        joined = values.to(self.device, copy=True)
        dist.all_reduce(joined, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return joined.cpu()

    def close(self) -> None:
        """Leave the group; the last user of one that was made here ends it."""
        global _own_group_users
        if self._owns:
            self._owns = False
            _own_group_users -= 1
            if not _own_group_users and dist.is_initialized():
                dist.destroy_process_group()


def find_blocks(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules of these classes, in order. Raises RecipeError when names were given and none matches."""
    blocks = [part for part in module.modules() if type(part).__name__ in class_names]
    if class_names and not blocks:
        found = sorted({type(part).__name__ for part in module.modules()})
        near = difflib.get_close_matches(class_names[0], found, n=3, cutoff=0.3) or found[:3]
        raise RecipeError(
            f"model.spec.wrap_blocks: {', '.join(class_names)} was asked for; {type(module).__name__} has no such "
            f"module. Nearest: {', '.join(near)}. Nothing would be sharded block by block; correct the model's spec."
        )
    return blocks


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Activation checkpointing: run each block again in the backward pass.

    Replaces `forward` on the instance, so that no parameter changes its name. Call before `shard`.
    """
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard(module: nn.Module, blocks: Sequence[nn.Module], *, ranks: Ranks, precision: str) -> None:
    """Wrap every block, then what is left in the root, over all ranks.

    precision: `none`, `bf16` or `fp16`. Then the root casts as a pipeline in that dtype would: latents and embeddings,
    not timesteps (bf16 cannot tell 987 from 988) and not what a block is given by the root (rotary tables stay fp32).
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.num_ranks,), mesh_dim_names=("shard",))
    inner = root = MixedPrecisionPolicy()
    if precision in DTYPES:
        dtype = DTYPES[precision]
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # output_dtype on the root alone: on a block it would hand fp32 activations to the next one's 16-bit weights.
        root = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        )
        module.register_forward_pre_hook(functools.partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=True)
    # True for the root as well: FSDP would leave it whole after a forward, and a swap of the shards would go unseen.
    fully_shard(module, mesh=mesh, mp_policy=root, reshard_after_forward=True)


def reshard(module: nn.Module) -> None:
    """Make sure that the shards, not gathered copies of them, are what the module holds."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """A detached copy of the whole tensor. Collective: every rank calls it."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value.to(dtype)
        return value

    kept = {key: value for key, value in kwargs.items() if key.startswith("timestep")}
    return tree_map(cast, args), {**tree_map(cast, kwargs), **kept}
