"""Forwards of rows that do not fit into one batch, whose number depends on the rows that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from unirl.core.errors import RunFailed

__all__ = ["check_equal_forwards", "in_groups"]


def check_equal_forwards(module: nn.Module, *, reason: str, instead: str = "Train on one process.") -> None:
    """Raise RunFailed where a module is sharded over several ranks: they must run it equally often, or they wait for
    each other forever.

    reason: why rows need separate forwards, as the subject and verb of a sentence.  instead: what to do.
    """
    if _is_shared(module):
        raise RunFailed(
            f"model: {reason} need separate forwards, so sharded ranks would not all run the same number of forwards. "
            f"{instead}"
        )


def in_groups(
    keys: Sequence[Hashable], forward: Callable[[list[int]], Tensor], *, module: nn.Module | None = None
) -> Tensor:
    """forward(rows) of the rows of each key, [len(rows), ...], put back into the order of the rows.

    keys: [B]; rows of equal keys go together.  module: what `forward` runs once. Where it is sharded over ranks this is
    collective: those with fewer keys than others run their last rows again, and drop the result, so that all run it
    equally often, in the backward pass too.
    Returns [B, ...].
    """
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    rows = list(groups.values())
    # First: in between, ranks would wait for each other in different calls.
    most = _most(len(rows), module)
    parts = [forward(own) for own in rows]
    for _ in range(most - len(rows)):
        # Part of the graph, without weight.
        parts[-1] = parts[-1] + 0 * forward(rows[-1]).sum()
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([row for own in rows for row in own], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _most(count: int, module: nn.Module | None) -> int:
    """The largest count of the ranks that share a module."""
    if module is None or not _is_shared(module):
        return count
    # On the CPU: the device need not wait for it.
    result = torch.tensor(count)
    torch.distributed.all_reduce(result, op=torch.distributed.ReduceOp.MAX)  # pyright: ignore[reportUnknownMemberType]
    return int(result)


def _is_shared(module: nn.Module) -> bool:
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return isinstance(module, FSDPModule) and not is_alone
