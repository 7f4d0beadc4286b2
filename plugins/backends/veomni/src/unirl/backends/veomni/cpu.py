"""Support that VeOmni lacks on a CPU with gloo: a kernel for split experts, and a reduction that gloo has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import linear

__all__ = ["experts_forward", "reduce_by_sums"]


def reduce_by_sums(experts: Iterable[nn.Module], *, num_shards: int) -> None:
    """Reduce gradients of experts by plain sums. VeOmni sets its own divide factor, for which torch uses NCCL's
    `PREMUL_SUM`; gloo has only sums.

    num_shards: of each expert. With a single one nothing is reduced, and torch 2.13 would divide by the factor twice.
    """
    for part in experts:
        if isinstance(part, FSDPModule) and num_shards > 1:
            part.set_force_sum_reduction_for_comms(True)


def experts_forward(group: dist.ProcessGroup) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    """The forward of a module of experts that is split over a group, in plain torch.

    hidden: [T, H] of this rank.  chosen: [T, K] experts of each token, counted over all ranks.  weights: [T, K].
    Returns [T, H]: per token the weighted sum of down(silu(gate x) * up x) over its experts. Every rank of the group
    calls it equally often; a rank may have no tokens.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.get_parameter("gate_up_proj"), self.get_parameter("down_proj")
        activation = self.get_submodule("act_fn")
        here = len(down)
        flat = chosen.flatten()
        # By expert, and so by rank: rank r holds experts r here to (r + 1) here.
        order = flat.argsort(stable=True)
        token = order // chosen.shape[1]
        counts = flat.bincount(minlength=num_ranks * here)
        every = [torch.empty_like(counts) for _ in range(num_ranks)]
        dist.all_gather(every, counts, group=group)
        sent = counts.view(num_ranks, here).sum(1).tolist()
        # [ranks, here]: tokens that each rank sends to each expert of this one.
        arriving = torch.stack(every).view(num_ranks, num_ranks, here)[:, rank]
        received = arriving.sum(1).tolist()
        rows = hidden[token]
        mine = all_to_all_single(rows.new_empty(sum(received), rows.shape[1]), rows, received, sent, group=group)
        owner = torch.arange(here).repeat(num_ranks).repeat_interleave(arriving.flatten())
        result = torch.zeros_like(mine)
        for expert in range(here):
            (of_expert,) = (owner == expert).nonzero(as_tuple=True)
            gate, up = linear(mine[of_expert], gate_up[expert]).chunk(2, dim=-1)
            result = result.index_add(0, of_expert, linear(activation(gate) * up, down[expert]))
        back = all_to_all_single(torch.empty_like(rows), result, sent, received, group=group)
        scaled = back * weights.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(hidden).index_add(0, token, scaled)

    return forward
