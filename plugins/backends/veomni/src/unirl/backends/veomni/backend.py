"""The VeOmni backend: a module in VeOmni's mesh, wrapped and stepped by it; all else is as in every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.train_host.backend import ShardedBackend
from unirl.train_host.optimizer import ADAM, FUSED_ON, Optimizer
from unirl.train_host.ranks import groups_left_on_error
from unirl.train_host.sharding import is_empty

from . import cpu
from .config import VeomniConfig
from .experts import split_experts, whole_view
from .library import veomni
from .ranks import VeomniRanks
from .wrapping import parallelize, put_back

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.specs.config import TrainConfig
    from unirl.train_host.config import ShardedConfig

__all__ = ["VeomniBackend", "build"]

MOMENTS = {
    "adamw": ADAM,
    "anyprecision_adamw": dict.fromkeys(("exp_avg", "exp_avg_sq", "compensation"), torch.bfloat16),
}
"""State of each optimizer for a parameter, besides its step."""


@groups_left_on_error()
def build(config: VeomniConfig, *, model: Model, train: TrainConfig, steps: int, seed: int = 0) -> VeomniBackend:
    """Build a backend for `model.trainable`, which is adapted, cast and wrapped in place. Imports VeOmni.

    steps: rounds of the run, from which the learning rate's schedule knows its end.  seed: of the adapters' start.
    Raises RecipeError for settings, targets or blocks that match nothing in the model, and without VeOmni.
    """
    check_config(config, key="backend")
    return VeomniBackend(config, model=model, train=train, steps=steps, seed=seed)


class VeomniBackend(ShardedBackend):
    _config: VeomniConfig
    _ranks: VeomniRanks

    def _join(self, model: Model) -> VeomniRanks:
        ranks = VeomniRanks(self._device, self._config.mesh)
        if ranks.num_ranks * ranks.num_sequence == 1 and self._config.mixed_precision != "none":
            raise RecipeError(
                f"backend.mixed_precision: got {self._config.mixed_precision} on one rank, which VeOmni does not wrap. "
                "Use none with model.autocast=bfloat16 where the model has it, or backend=fsdp2."
            )
        return ranks

    def _distribute(self, model: Model, blocks: Sequence[nn.Module]) -> bool:
        module, ranks = self._module, self._ranks
        was_empty = is_empty(module)
        if ranks.num_ranks * ranks.num_sequence == 1:
            # VeOmni refuses to wrap a single rank.
            self._complete(model, blocks)
            return False
        if ranks.num_sequence > 1:
            model.split_sequence(ranks.sequence_mesh)
        # Of a module without values: the adapters, which have some.
        values = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
        experts = split_experts(module, ranks) if ranks.num_experts > 1 else []
        with ranks.as_current():
            parallelize(module, blocks, precision=self._config.mixed_precision)
        if experts and ranks.device.type == "cpu":
            cpu.reduce_by_sums(experts, num_shards=ranks.num_expert_shards)
        held = {name: self._view(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
        put_back((held[name], value) for name, value in values.items() if not value.is_meta)
        if was_empty:
            self._fill(model, held)
        return True

    def _new_optimizer(self, config: ShardedConfig, *, total_steps: int) -> Optimizer:
        name = self._config.optimizer
        with self._ranks.as_current():
            built = veomni("optim").build_optimizer(
                self._module,
                lr=config.lr,
                betas=tuple(config.betas),
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=self._device.type in FUSED_ON,
                optimizer_type=name,
            )
        # One for the experts and one for the rest, where experts are split.
        adams: list[torch.optim.Optimizer] = list(getattr(built, "optimizers_dict", {"": built}).values())
        return Optimizer(
            self._params,
            config,
            total_steps=total_steps,
            adams=adams,
            moments=MOMENTS[name],
            view=self._view,
        )

    def _view(self, tensor: Tensor) -> Tensor:
        return whole_view(tensor, self._ranks)
