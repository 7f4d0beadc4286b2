"""Frozen weights in 8 or 4 bits, through torchao."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError

__all__ = ["dequantized", "is_quantized", "quantize"]


def quantize(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    kind: str,
    device: torch.device,
    fill: Callable[[Mapping[str, Tensor]], None],
) -> int:
    """Quantize the frozen weights of the linear layers in these blocks of a module, in place, and return their number.

    Layer by layer on the device: besides what is quantized, the weight of one layer is there in its dtype. Adapters,
    biases, and everything outside of the blocks stay. The result has a gradient with respect to its input.

    kind: `int8` or `nf4`.  fill: sets tensors, by their names in the module, to the checkpoint's values; called for
    layers without values. Raises RecipeError for a layer whose size nf4 does not take.
    """
    inside = {part for block in blocks for part in block.modules()}
    layers = {
        name: part
        for name, part in module.named_modules()
        if part in inside and isinstance(part, nn.Linear) and not part.weight.requires_grad and ".lora_" not in name
    }
    for name, layer in layers.items():
        weight = layer.weight.detach()
        if weight.is_meta:
            weight = torch.empty_like(weight, device=device)
            fill({f"{name}.weight": weight})
        layer.weight = nn.Parameter(_quantized(weight.to(device), kind, name), requires_grad=False)
    return len(layers)


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is one of torchao's, which loads nothing."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def dequantized(tensor: Tensor) -> Tensor:
    """A quantized tensor as an ordinary one of its dtype, which is what layers compute with; any other as it is."""
    if not is_quantized(tensor):
        return tensor
    torchao: Any = tensor.detach()
    # NF4Tensor has another function of the name `dequantize`.
    return torchao.get_original_weight() if hasattr(torchao, "get_original_weight") else torchao.dequantize()


def _quantized(weight: Tensor, kind: str, name: str) -> Tensor:
    torchao: Any = importlib.import_module("torchao.quantization")
    if kind == "int8":
        return torchao.Int8Tensor.from_hp(weight, torchao.PerRow())
    if weight.numel() % 64:
        raise RecipeError(
            f"backend.quantize: got nf4, but layer {name!r} has {weight.numel()} weights, expected a multiple of 64, "
            "the size of a block. Use int8."
        )
    # Scales are quantized 256 at a time; a small layer may have another number of them.
    return torchao.to_nf4(weight, scaler_block_size=math.gcd(weight.numel() // 64, 256))
