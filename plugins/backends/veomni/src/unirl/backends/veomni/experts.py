"""Expert parallelism: which weights are split over the ranks, how they are run, and how they are seen as a whole."""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from unirl.core.errors import RecipeError

from . import cpu
from .library import veomni
from .ranks import VeomniRanks

__all__ = ["split_experts", "whole_view"]

SILU = ("SiLU", "SiLUActivation")
"""The activation of VeOmni's kernels, as torch and transformers name it."""


def split_experts(module: nn.Module, ranks: VeomniRanks) -> list[nn.Module]:
    """Give the module VeOmni's plan for its experts, and run these through its exchange of tokens. Returns them.

    Call before the module is wrapped, which slices the weights by that plan. Raises RecipeError for a module without
    experts of the layout of transformers' fused ones: `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].
    """
    experts = {name: part for name, part in module.named_modules() if _is_fused(part)}
    if not experts:
        raise RecipeError(
            f"backend.mesh.expert: got {ranks.num_experts}, but {type(module).__name__} has no experts of the layout "
            "that VeOmni splits (gate_up_proj [E, 2 I, H] and down_proj [E, H, I] with SiLU, no biases). Use 1."
        )
    for name, part in experts.items():
        total = part.get_parameter("down_proj").shape[0]
        if total % ranks.num_experts:
            raise RecipeError(
                f"backend.mesh.expert: got {ranks.num_experts}, but {name!r} has {total} experts, which is not "
                "divisible by it. Choose a divisor."
            )
        part.forward = MethodType(_forward(ranks), part)
    patterns = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in experts})
    split = {f"{pattern}.{weight}": Shard(0) for pattern in patterns for weight in ("gate_up_proj", "down_proj")}
    plan = veomni("distributed.parallel_plan").ParallelPlan({"ep": split})
    # It names the modules of the first weight alone.
    plan.extra_parallel_fsdp_no_shard_module = {"ep": set(patterns)}
    module.__dict__["get_parallel_plan"] = lambda: plan
    return list(experts.values())


def whole_view(tensor: Tensor, ranks: VeomniRanks) -> Tensor:
    """The same memory as a shard of all experts. VeOmni's parameters know the shards of this rank's experts alone."""
    mesh = ranks.expert_mesh
    if mesh is None or not isinstance(tensor, DTensor) or "ep_fsdp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return tensor
    shape = torch.Size([tensor.shape[0] * ranks.num_experts, *tensor.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    placements = [*tensor.placements, Shard(0)]
    with torch.no_grad():
        mine = tensor.to_local()
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_fused(part: nn.Module) -> bool:
    weights = dict(part.named_parameters())
    if weights.keys() != {"gate_up_proj", "down_proj"} or type(getattr(part, "act_fn", None)).__name__ not in SILU:
        return False
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    return gate_up.ndim == down.ndim == 3 and gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])


def _forward(ranks: VeomniRanks) -> Any:
    """Forward of a module of experts: (self, hidden [T, H], chosen [T, K], weights [T, K]) -> [T, H]."""
    if ranks.device.type == "cpu":
        return cpu.experts_forward(ranks.state.ep_group)
    kernel = veomni("ops.kernel_registry").KERNEL_REGISTRY.resolve("moe_experts", "standard", "triton")

    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if hidden.dtype not in (torch.bfloat16, torch.float16):
            raise RecipeError(
                f"backend.mesh.expert: VeOmni's kernel takes 16-bit hidden states, got {hidden.dtype}. Use "
                "backend.mixed_precision=bf16."
            )
        with ranks.as_current():
            return kernel(self, hidden, chosen, weights)

    return forward
