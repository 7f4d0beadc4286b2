"""The module before it is sharded: what trains in it, with adapters or as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unirl.core.errors import RecipeError
from unirl.core.specs.facts import names_in
from unirl.core.specs.lr_scales import lr_scales_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from unirl.core.roles import Model

    from .config import ShardedConfig
    from .ranks import Ranks

__all__ = ["check_blocks", "check_ranks", "prepare"]


def check_blocks(config: ShardedConfig, blocks: Sequence[nn.Module]) -> None:
    """Raises RecipeError for a setting about blocks of a model that names none."""
    for key, is_set in (
        ("activation_checkpointing", config.activation_checkpointing),
        ("compile", config.compile != "none"),
        ("offload_frozen", config.offload_frozen != "none"),
    ):
        if is_set and not blocks:
            raise RecipeError(f"backend.{key}: the model's spec names no wrap_blocks, which it is for; leave it off.")


def check_ranks(config: ShardedConfig, ranks: Ranks) -> None:
    """Raises RecipeError for weights that are to be quantized on several ranks."""
    if config.quantize != "none" and ranks.num_ranks * ranks.num_sequence * ranks.num_tensor > 1:
        raise RecipeError(
            f"backend.quantize: got {config.quantize} on several ranks, and quantized weights cannot be sharded. Start "
            "one process, or use none."
        )


def prepare(model: Model, config: ShardedConfig, *, seed: int, device: torch.device) -> tuple[int, Mapping[str, float]]:
    """Cast what the model has not frozen to fp32, or add adapters to it, and freeze what has a learning rate of 0.

    Returns the number of adapted layers, and the factor of the learning rate of each parameter that trains or has been
    frozen here, by its name. Raises RecipeError for a model that has frozen everything.
    """
    module = model.trainable
    trainable = [param for param in module.parameters() if param.requires_grad]
    if not trainable:
        raise RecipeError(
            f"backend: model {model.spec.name!r} has frozen every parameter of its {model.spec.trainable!r}, so there "
            "is nothing to train. The model must leave those that train with requires_grad=True."
        )
    adapted = 0
    if config.trains == "full":
        # Those of rate 0 as well: other processes, which send or receive weights, know only what the model froze.
        for param in trainable:
            param.data = param.data.float()
    else:
        from .adapters import add_lora

        targets = names_in(model.spec.lora_targets, module, may_be_empty=True)
        adapted = add_lora(module, config.lora, default_targets=targets, seed=seed, device=device)
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    scales = lr_scales_of(config.lr_scales, named, module=type(module).__name__)
    for name, scale in scales.items():
        named[name].requires_grad_(scale > 0)
    return adapted, scales
