"""Models whose number of forwards depends on the rows that a rank has."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from unirl.core.errors import RunFailed

__all__ = ["check_equal_forwards"]


def check_equal_forwards(module: nn.Module, *, reason: str) -> None:
    """Raise RunFailed where a module is sharded over several ranks: they must run it equally often, or they wait for
    each other forever.

    reason: why rows need separate forwards, as the subject and verb of a sentence.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    if isinstance(module, FSDPModule):
        raise RunFailed(
            f"model: {reason} need separate forwards, so sharded ranks would not all run the same number of forwards. "
            "Train on one process."
        )
