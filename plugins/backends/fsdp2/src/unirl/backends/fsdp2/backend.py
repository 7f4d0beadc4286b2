"""The FSDP2 backend: torch's own sharding, with tensor and sequence parallelism where the model has a plan for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.core.specs.memory import GATHERED_SHARE
from unirl.train_host.backend import ShardedBackend
from unirl.train_host.ranks import Ranks, groups_left_on_error
from unirl.train_host.sharding import DTYPES, cast_ends, gathered_bytes, shard, split

from .config import Fsdp2Config

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.specs.config import TrainConfig
    from unirl.train_host.config import ShardedConfig
    from unirl.train_host.optimizer import Optimizer

__all__ = ["Fsdp2Backend", "build"]


@groups_left_on_error()
def build(config: Fsdp2Config, *, model: Model, train: TrainConfig, steps: int, seed: int = 0) -> Fsdp2Backend:
    """Build a backend for `model.trainable`, which is adapted, cast and wrapped in place.

    steps: rounds of the run, from which the learning rate's schedule knows its end.  seed: of the adapters' start.
    Raises RecipeError for settings, targets or blocks that match nothing in the model.
    """
    check_config(config, key="backend")
    return Fsdp2Backend(config, model=model, train=train, steps=steps, seed=seed)


class Fsdp2Backend(ShardedBackend):
    _config: Fsdp2Config

    def _join(self, model: Model) -> Ranks:
        mesh = self._config.mesh
        return Ranks(
            self._device, needs_group=self._wants_wrap, shard=mesh.shard, tensor=mesh.tensor, sequence=mesh.sequence
        )

    def _distribute(self, model: Model, blocks: Sequence[nn.Module]) -> bool:
        ranks, mesh = self._ranks, self._config.mesh
        if mesh.tensor > 1:
            split(self._module, model.spec.tensor_parallel, ranks=ranks)
        if mesh.sequence > 1:
            model.split_sequence(ranks.sequence_mesh)
        wraps = self._wants_wrap or (ranks.num_ranks * ranks.num_sequence > 1 and not self._config.replicates)
        if wraps and self._config.offload_frozen != "none":
            raise RecipeError(
                f"backend.offload_frozen: got {self._config.offload_frozen}, but the module is wrapped, which gathers "
                "weights from shards on the device. Use one rank or mesh.shard=1, with mixed_precision=none and "
                "model.autocast=bfloat16 where the model has it, or none."
            )
        if wraps:
            precision = self._config.mixed_precision
            shard(self._module, blocks, ranks=ranks, precision=precision, keeps_gathered=self._keeps_gathered)
        elif self._config.mixed_precision in DTYPES:
            from unirl.train_host.adapters import compute_adapters_in

            dtype = DTYPES[self._config.mixed_precision]
            compute_adapters_in(self._module, dtype)
            cast_ends(self._module, dtype)
        self._complete(model, blocks)
        return wraps

    def _new_optimizer(self, config: ShardedConfig, *, total_steps: int) -> Optimizer:
        if self._config.optimizer == "adamw":
            return super()._new_optimizer(config, total_steps=total_steps)
        from unirl.train_host.adam_8bit import adam_8bit

        return adam_8bit(self._params, config, total_steps=total_steps)

    @property
    def _keeps_gathered(self) -> bool:
        reshards = self._config.reshard_after_forward
        if reshards != "auto" or self._device.type != "cuda":
            return reshards == "never"
        size = gathered_bytes(self._module, precision=self._config.mixed_precision)
        return size <= GATHERED_SHARE * torch.cuda.get_device_properties(self._device).total_memory

    @property
    def _wants_wrap(self) -> bool:
        """Whether the module is wrapped on one rank, too: FSDP casts there what is not in the dtype to compute in."""
        config = self._config
        if config.shard == "always" or config.mixed_precision not in DTYPES:
            return config.shard == "always"
        # Adapters are cast without it. A critic is a copy of the model in fp32.
        is_cast = all(
            param.dtype is DTYPES[config.mixed_precision]
            for name, param in self._module.named_parameters()
            if param.is_floating_point() and not param.requires_grad and ".lora_" not in name
        )
        return config.trains == "full" or config.critic.lr is not None or not is_cast
