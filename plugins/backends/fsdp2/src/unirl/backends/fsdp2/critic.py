"""The critic: a copy of the model's trunk with one output, sharded, trained and saved beside the policy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from unirl.core.errors import RecipeError
from unirl.core.roles import TokenBatch, lazy_model, text_model
from unirl.numerics.tokens.replay import replay_values

from .optimizer import Optimizer
from .sharding import allocate, is_empty, recompute, reshard, shard, split

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.types.track import Track
    from unirl.numerics.train.stack import StepReport

    from .config import Fsdp2Config
    from .ranks import Ranks

__all__ = ["Critic", "CriticNet"]


class CriticNet(nn.Module):
    """A copy of a text model's trunk, fp32 where it trains, with a linear value head that starts at 0, and so do the
    values.

    Create it before the trunk is adapted or wrapped: it starts from the checkpoint's weights.
    """

    def __init__(self, model: Model) -> None:
        """Raises RecipeError for a model without a text track."""
        super().__init__()
        if "text" not in model.spec.tracks.values():
            raise RecipeError(
                f"backend.critic.lr: a critic reads tokens, but model {model.spec.name!r} has no text track; use null."
            )
        text = text_model(model)
        original: nn.Module = text.trunk
        self.place = next(name for name, part in model.trainable.named_modules() if part is original)
        """Name of the trunk within the model's trainable module."""
        self.trunk = copy.deepcopy(original).eval()
        for param in self.trunk.parameters():
            param.data = param.data.float() if param.requires_grad else param.data
        self._hidden = text.hidden
        self.head = nn.Linear(text.hidden_size, 1, device=torch.device(model.device))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T, 1] fp32, before each target of the batch. The output is fp32 also where the trunk computes in 16 bits."""
        states: Tensor = self._hidden(batch, trunk=self.trunk)
        return self.head(states.float())

    def tensor_parallel(self, plan: Mapping[str, str]) -> dict[str, str]:
        """The entries of a model's plan for its trunk, under the names used here."""
        prefix = f"{self.place}." if self.place else ""
        return {f"trunk.{name.removeprefix(prefix)}": how for name, how in plan.items() if name.startswith(prefix)}

    def fill(self, model: Model) -> None:
        """Allocate a trunk without values, each rank its shards, and fill it from the checkpoint."""
        allocate(self, torch.device(model.device))
        prefix = f"{self.place}." if self.place else ""
        tensors = self.trunk.state_dict(keep_vars=True)
        lazy_model(model).fill({f"{prefix}{name}": tensor for name, tensor in tensors.items()})


class Critic:
    """Implements `unirl.numerics.train.updater.CriticUpdater`. Methods that touch weights are collective."""

    def __init__(
        self,
        net: CriticNet,
        config: Fsdp2Config,
        *,
        model: Model,
        blocks: Sequence[nn.Module],
        ranks: Ranks,
        wraps: bool,
        packing: bool,
        steps: int,
    ) -> None:
        """blocks: of its trunk, which are wrapped one by one.  wraps: shard it, as the policy is.

        steps: of its optimizer over the run, for the schedule of its rate.
        """
        assert config.critic.lr is not None
        self.net = net
        self._model, self._packing = text_model(model), packing
        self._warmup_steps = config.critic.warmup_steps
        self._defers = config.defer_gradient_sync
        if config.activation_checkpointing:
            recompute(blocks)
        if config.mesh.tensor > 1:
            split(net, net.tensor_parallel(model.spec.tensor_parallel), ranks=ranks)
        if wraps:
            # By itself, so that no mixed precision reaches it: 8 bits of a value are too few to learn from.
            fully_shard(net.head, mesh=ranks.shard_mesh, reshard_after_forward=True)
            shard(net, blocks, ranks=ranks, precision=config.mixed_precision)
        if is_empty(net):
            net.fill(model)
        params = {name: param for name, param in net.named_parameters() if param.requires_grad}
        own = dataclasses.replace(
            config,
            lr=config.critic.lr,
            max_grad_norm=config.critic.max_grad_norm,
            lr_warmup_steps=config.critic.lr_warmup_steps,
        )
        self.optimizer = Optimizer(params, own, total_steps=steps)

    @property
    def is_alone(self) -> bool:
        return self.optimizer.num_steps < self._warmup_steps

    def values(self, track: Track) -> Tensor:
        def critic(batch: TokenBatch) -> Tensor:
            return self.net(batch).squeeze(1)

        return replay_values(critic, self._model, track, packing=self._packing)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if isinstance(self.net, FSDPModule):
            self.net.set_requires_gradient_sync(last or not self._defers)
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
