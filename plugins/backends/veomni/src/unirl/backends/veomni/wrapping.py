"""Handing a module to VeOmni to shard, and its values back to it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from unirl.numerics.precision import cast_inputs
from unirl.train_host.sharding import DTYPES, tied_places

from .library import veomni

__all__ = ["parallelize", "put_back"]


def parallelize(module: nn.Module, blocks: Sequence[nn.Module], *, precision: str) -> None:
    """Wrap every block, experts, and the root with VeOmni, in place and on the device; the values are lost.

    precision: `none` or `bf16`; then inputs are cast as in `unirl.train_host.sharding.shard`, outputs to fp32.
    Call within `VeomniRanks.as_current`.
    """
    is_mixed = precision in DTYPES
    retie = tied_places(module)
    result = veomni("distributed.torch_parallelize").build_parallelize_model(
        module,
        mixed_precision=veomni("arguments.arguments_types").MixedPrecisionConfig(
            enable=is_mixed, cast_forward_inputs=False
        ),
        # Blocks are recomputed already where that is asked for.
        enable_gradient_checkpointing=False,
        basic_modules=sorted({type(block).__name__ for block in blocks}),
        # It takes nothing else, and then allocates every parameter, whether or not it has values.
        init_device="meta",
        should_skip_hf_weight_load=True,
    )
    assert result is module and isinstance(module, FSDPModule)
    retie()
    # VeOmni leaves the root whole after a forward, and a swap of the shards would go unseen.
    module.set_reshard_after_forward(True, recurse=False)
    if is_mixed:
        dtype = DTYPES[precision]
        module.register_forward_pre_hook(functools.partial(cast_inputs, dtype=dtype), with_kwargs=True)
        module.register_forward_hook(_to_fp32)


@torch.no_grad()
def put_back(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set tensors, or this rank's shards of them, to whole ones that every rank has. Not collective."""
    for tensor, whole in tensors:
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(whole)


def _to_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args

    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, output)
