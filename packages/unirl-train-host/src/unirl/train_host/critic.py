"""The critic: a copy of the model with one output, sharded, trained and saved beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from .optimizer import Optimizer
from .sharding import compile_blocks, is_empty, recompute, reshard, shard, split

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.types.track import Track
    from unirl.numerics.train.stack import StepReport

    from .config import ShardedConfig
    from .critic_nets import CriticNet
    from .ranks import Ranks

__all__ = ["Critic"]


class Critic:
    """Implements `unirl.numerics.train.updater.CriticUpdater`. Methods that touch weights are collective."""

    def __init__(
        self,
        net: CriticNet,
        config: ShardedConfig,
        *,
        model: Model,
        blocks: Sequence[nn.Module],
        ranks: Ranks,
        wraps: bool,
        packing: bool,
        stacked: bool,
        updates: int,
    ) -> None:
        """blocks: of its trunk, which are wrapped one by one.  wraps: shard it, as the policy is.

        packing, stacked: see `CriticNet.values`.  updates: of the policy over the run, for the schedule of its rate.
        """
        self.net = net
        self._packing, self._stacked = packing, stacked
        self._warmup_steps = config.critic.warmup_steps
        self.steps_per_update = config.critic.steps_per_update
        self._defers = config.defer_gradient_sync
        if config.activation_checkpointing:
            recompute(blocks)
        if config.compile == "blocks":
            compile_blocks(blocks, device=torch.device(model.device))
        if ranks.num_tensor > 1:
            split(net, net.tensor_parallel(model.spec.tensor_parallel), ranks=ranks)
        if wraps:
            # By itself, so that no mixed precision reaches it: 8 bits of a value are too few to learn from.
            fully_shard(net.head, mesh=ranks.shard_mesh, reshard_after_forward=True)
            shard(net.trunk, blocks, ranks=ranks, precision=config.mixed_precision)
        if is_empty(net):
            net.fill(model)
        params = {name: param for name, param in net.named_parameters() if param.requires_grad}
        total = updates * self.steps_per_update
        self.optimizer = Optimizer(params, config.for_auxiliary(config.critic), total_steps=total)

    @property
    def is_alone(self) -> bool:
        return self.optimizer.num_steps < self._warmup_steps

    def values(self, track: Track) -> Tensor:
        return self.net.values(track, packing=self._packing, stacked=self._stacked)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        for part in (self.net.trunk, self.net.head):
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(last or not self._defers)
        (loss * self.optimizer.loss_scale).backward()

    def step(self) -> StepReport:
        return self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by their names in a checkpoint."""
        reshard(self.net)
        return {f"weights/{name}": param.detach() for name, param in self.optimizer.params.items()}

    def to(self, device: torch.device) -> None:
        reshard(self.net)
        self.net.to(device)
        self.optimizer.to(device)
