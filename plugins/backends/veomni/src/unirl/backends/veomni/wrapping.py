"""Handing a module to VeOmni to shard, and its values back to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from unirl.train_host.sharding import DTYPES, cast_ends, tied_places

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
        cast_ends(module, DTYPES[precision])


@torch.no_grad()
def put_back(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set tensors, or this rank's shards of them, to whole ones that every rank has. Not collective."""
    for tensor, whole in tensors:
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(whole)
