"""Gradients and optimizer steps of a module over its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from unirl.numerics.train.stack import StepReport

from .optimizer import Optimizer
from .ranks import Ranks
from .sharding import reshard

__all__ = ["ShardedUpdater"]


class ShardedUpdater:
    """Implements `unirl.numerics.train.updater.Updater`.

    defer_sync: reduce gradients with the last backward pass of an update only. Of a module that is not wrapped they are
    reduced before the step.
    after_step: called after each step that the optimizer took.
    """

    # Reduce-scatter divides by the ranks.
    gradient_reduction: Literal["mean", "sum"] = "mean"

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        ranks: Ranks,
        device: torch.device,
        defer_sync: bool,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._module = module
        self._optimizer = optimizer
        self._ranks = ranks
        self._defers_sync = defer_sync
        self._after_step = after_step

    @property
    def num_ranks(self) -> int:
        return self._ranks.num_ranks

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(last or not self._defers_sync)
        # FSDP averages over the ranks of a sequence too, whose gradients add up to the whole.
        (loss * (self._optimizer.loss_scale * self._ranks.num_sequence)).backward()

    def step(self) -> StepReport:
        if isinstance(self._module, FSDPModule):
            # What a forward after the last backward pass has gathered would be older than the shards.
            reshard(self._module)
        else:
            self._ranks.average_gradients(self._optimizer.params.values())
        report = self._optimizer.step()
        if not report.skipped:
            self._after_step()
        return report

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return self._ranks.all_reduce(values, "sum")

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return self._ranks.all_reduce(values, "max")
