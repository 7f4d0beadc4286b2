"""Sharding: wrapping or splitting modules over the ranks, and gathering full tensors from shards."""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from unirl.core.errors import RecipeError
from unirl.numerics.precision import cast_inputs

from .ranks import Ranks

__all__ = [
    "DTYPES",
    "allocate",
    "cast_ends",
    "check_compiler",
    "compile_blocks",
    "fill",
    "find_blocks",
    "forget_forwards",
    "full",
    "gathered_bytes",
    "is_empty",
    "local",
    "recompute",
    "reshard",
    "shard",
    "split",
    "tied_places",
]

_GRAPHS = 64
"""Compiled graphs of a class of blocks, at most."""
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_blocks(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules of these classes, in order. Raises RecipeError when names are given and none matches."""
    blocks = [part for part in module.modules() if type(part).__name__ in class_names]
    if class_names and not blocks:
        result = sorted({type(part).__name__ for part in module.modules()})
        near = difflib.get_close_matches(class_names[0], result, n=3, cutoff=0.3) or result[:3]
        raise RecipeError(
            f"model.spec.wrap_blocks: got {', '.join(class_names)}, but {type(module).__name__} has no such "
            f"module. Nearest: {', '.join(near)}. Nothing would be sharded block by block; correct the model's spec."
        )
    return blocks


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Activation checkpointing: run each block again in the backward pass.

    Replaces `forward` on the instance, so that no parameter changes its name. Call before `shard`.
    """
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def check_compiler(device: torch.device, *, key: str, value: str, instead: str) -> None:
    """Raise RecipeError for this setting where torch.compile does not work on a device.

    instead: the value that does without.
    """
    try:
        cast("Any", torch.compile(lambda x: x + 1))(torch.zeros(3, device=device))
    except Exception as error:
        needs = (
            "A C++ compiler is needed, such as g++" if device.type == "cpu" else "Triton and a C compiler are needed"
        )
        raise RecipeError(
            f"{key}: got {value!r}, but torch.compile fails on {device.type} here: {error} {needs}. Install what is "
            f"missing, or use {instead}."
        ) from error


def compile_blocks(blocks: Iterable[nn.Module], *, device: torch.device) -> None:
    """Compile each block by torch.compile, without the hooks of wrappers. Blocks of one class share their kernels.

    Replaces `forward` on the instance, as `recompute` does, after which it is called. Shapes: the first is compiled as
    it is, the second with sizes left open. Generation with a cache of tokens is not compiled: every layer and length
    would be by itself.
    Raises RecipeError, key `backend.compile`, where torch cannot compile.
    """
    check_compiler(device, key="backend.compile", value="blocks", instead="none")
    settings: Any = import_module("torch._dynamo.config")
    # With and without gradients, adapters and fixed sizes: more than the 8 after which torch silently stops compiling.
    settings.recompile_limit = max(settings.recompile_limit, _GRAPHS)
    for block in blocks:
        plain, compiled = block.forward, cast("Any", torch.compile(block.forward))

        def forward(*args: Any, plain: Any = plain, compiled: Any = compiled, **kwargs: Any) -> Any:
            return (compiled if kwargs.get("past_key_values") is None else plain)(*args, **kwargs)

        block.forward = forward


def split(module: nn.Module, plan: Mapping[str, str], *, ranks: Ranks) -> None:
    """Tensor parallelism: split the linear layers of a model's plan over the ranks of `mesh.tensor`, in place.

    plan: the spec's `tensor_parallel`. Call before `shard`. Raises RecipeError for a name that matches no linear layer,
    and for one that LoRA adapts: the adapter would add whole outputs to split ones.
    """
    styles: dict[str, ParallelStyle] = {}
    for pattern, how in plan.items():
        matched = [name for name, _ in module.named_modules() if _matches(name, pattern)]
        linear = [name for name in matched if isinstance(module.get_submodule(name), nn.Linear)]
        if not matched or len(linear) != len(matched):
            what = "is adapted by LoRA or is not a linear layer" if matched else "matches no module"
            raise RecipeError(
                f"backend.mesh.tensor: {pattern!r} of the model's tensor_parallel plan {what}"
                f"{' (' + matched[0] + ')' if matched else ''}. Use mesh.tensor=1, or other LoRA targets."
            )
        for name in linear:
            styles[name] = ColwiseParallel() if how == "colwise" else RowwiseParallel()
    parallelize_module(module, ranks.tensor_mesh, styles)


def _matches(name: str, pattern: str) -> bool:
    """`*` matches one component of a dotted name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def shard(
    module: nn.Module, blocks: Sequence[nn.Module], *, ranks: Ranks, precision: str, keeps_gathered: bool = False
) -> None:
    """Wrap every block, then the root with the rest, over all ranks.

    While one block computes, FSDP gathers the next: in a forward because the host runs ahead of the device, in a
    backward pass by asking for it. Its explicit prefetch in forwards is not used: a block that was asked for and does
    not run, such as another expert's, would keep what was gathered beyond the next change of the weights.

    precision: `none`, `bf16` or `fp16`. Then the root casts as a pipeline in that dtype would: latents and embeddings,
    not timesteps (bf16 cannot tell 987 from 988) and not what a block is given by the root (rotary tables stay fp32).
    keeps_gathered: from a forward until the backward pass, or `reshard`. Else each of the two gathers.
    """
    # Nothing is done in place on what a module returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = ranks.shard_mesh
    inner = root = MixedPrecisionPolicy()
    if precision in DTYPES:
        dtype = DTYPES[precision]
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # output_dtype on the root alone: on a block it would hand fp32 activations to the next one's 16-bit weights.
        root = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        )
        module.register_forward_pre_hook(functools.partial(cast_inputs, dtype=dtype), with_kwargs=True)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=not keeps_gathered)
    # For the root as well, which FSDP would leave whole after a forward.
    fully_shard(module, mesh=mesh, mp_policy=root, reshard_after_forward=not keeps_gathered)


def gathered_bytes(module: nn.Module, *, precision: str) -> int:
    """Bytes of a module's weights when they are whole, in the dtype that they are gathered in."""
    dtype = DTYPES.get(precision)
    return sum(param.numel() * (dtype or param.dtype).itemsize for param in module.parameters())


def is_empty(module: nn.Module) -> bool:
    """Whether it has parameters without values, on the meta device."""
    return any(param.is_meta for param in module.parameters())


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate the parameters that have no values yet, each rank its shards, and move what has values to the device.

    As `Module.to_empty`, which would empty buffers as well and part tied parameters. Call after `shard`.
    """

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    retie = tied_places(module)
    module._apply(allocated)
    retie()


def tied_places(module: nn.Module) -> Callable[[], None]:
    """A function that ties the parameters again which are tied now, after something has replaced them one by one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(param), []).append((owner, name))

    def retie() -> None:
        for (owner, name), *others in places.values():
            for other, other_name in others:
                other.register_parameter(other_name, owner.get_parameter(name))

    return retie


def reshard(module: nn.Module) -> None:
    """Make sure that the module holds its shards, not gathered copies of them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def forget_forwards(module: nn.Module) -> None:
    """Clear FSDP's record of forwards, from which a backward pass prefetches: only the end of one clears it, so it
    grows in modules that never run one. Not between a forward and its backward pass, which would not prefetch then."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Set by the first forward.
            order: list[Any] = getattr(part._get_fsdp_state()._comm_ctx, "post_forward_order", [])
            for group in order:
                group._post_forward_indices.clear()
            order.clear()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """A detached copy of the whole tensor. Collective: every rank calls it."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        shard, whole = whole.to_local(), whole.full_tensor()
        if whole.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr():
            return whole
    return whole.clone()


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Set a tensor, or this rank's shard of it, from the whole of it. Collective where it is sharded."""
    whole = whole.to(tensor.device)
    tensor.copy_(
        distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole
    )


def cast_ends(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast inputs to the dtype and outputs to fp32, as `shard` does, of a module that it has not wrapped."""
    module.register_forward_pre_hook(functools.partial(cast_inputs, dtype=dtype), with_kwargs=True)

    def to_fp32(_module: nn.Module, _args: Any, output: Any) -> Any:
        def cast(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree_map(cast, output)

    module.register_forward_hook(to_fp32)
