"""Names that a spec needs, found in the module, so that one plugin can serve a family of models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from torch import nn

__all__ = ["attention_layers", "trained_attention_layers", "unsplit_blocks"]


def unsplit_blocks(module: nn.Module) -> tuple[str, ...]:
    """Class names of the blocks that transformers and diffusers never split over devices, those that the module has.

    For `ModelSpec.wrap_blocks`. Empty for a module that names none (`_no_split_modules`).
    """
    named = set(cast("Iterable[str]", getattr(module, "_no_split_modules", None) or ()))
    return tuple(dict.fromkeys(name for part in module.modules() if (name := type(part).__name__) in named))


def attention_layers(module: nn.Module) -> tuple[str, ...]:
    """Endings of the names of the linear layers right below attention modules, such as `self_attn.q_proj`.

    For `ModelSpec.lora_targets`. Attention modules are those in a block of `unsplit_blocks` whose name has "attn" or
    "attention" in it.
    """
    kinds = unsplit_blocks(module)
    blocks = [part for part in module.modules() if type(part).__name__ in kinds]
    linear = [name for block in blocks for name, part in _parts(block) if isinstance(part, nn.Linear)]
    # The last two components: the attention module and the layer.
    endings = [".".join(name.split(".")[-2:]) for name in linear]
    return tuple(dict.fromkeys(end for end in endings if re.match(r"[^.]*(attn|attention)[^.]*[.]", end)))


def trained_attention_layers(module: nn.Module) -> tuple[str, ...]:
    """Whole names of the linear layers that `attention_layers` finds, without those whose weights the model has frozen,
    and without those of torch's own attention, which reads weights and calls no layer.

    For `ModelSpec.lora_targets` of a model with several parts, whose layers may have the same endings.
    """
    endings = tuple(f".{end}" for end in attention_layers(module))
    return tuple(
        name
        for name, part in _parts(module)
        if type(part) is nn.Linear and name.endswith(endings) and part.weight.requires_grad
    )


def _parts(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """`named_modules`, whose type torch leaves open."""
    return cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
