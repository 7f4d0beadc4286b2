"""LoRA adapters through peft: choosing layers, switching them on or off, exporting their weights."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.specs.facts import adapted_layers

from .export import Delta
from .sections import LoraSettings

__all__ = ["add_lora", "compute_adapters_in", "lora_deltas", "lora_names", "plain_names", "switch_lora"]

ADAPTER = "default"


def add_lora(
    module: nn.Module, settings: LoraSettings, *, default_targets: Sequence[str], seed: int, device: torch.device
) -> int:
    """Add adapters to the target linear layers, in place; only they are trained. Returns the number of layers.

    The adapters are fp32 and initialised from `seed` alone, so they are the same on every rank, and whether or not the
    weights below them have values yet. Layers whose weight the model has frozen get none.
    Raises RecipeError when a target matches no linear layer, or one that peft refuses for the architecture.
    """
    kinds = {name: type(part).__name__ for name, part in module.named_modules()}
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    may_train = {name: module.get_parameter(f"{name}.weight").requires_grad for name in linear}
    names = adapted_layers(settings.targets or default_targets, may_train, module=kinds[""], kinds=kinds)
    module.requires_grad_(False)
    adapter = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  (peft divides it by the rank; floats are fine)
        target_modules=names,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
    )
    with torch.random.fork_rng(), _stand_ins(module, names, device):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(adapter, module, ADAPTER)
        except ValueError as error:
            # Such as layers whose weights fused kernels read, which would leave an adapter out.
            raise RecipeError(f"backend.lora.targets: {error}") from error
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return sum(1 for _ in _layers(module))


def switch_lora(module: nn.Module, *, on: bool) -> None:
    """Switch the adapter; with it off the module is the base model."""
    for _, layer in _layers(module):
        layer.enable_adapters(on)


def compute_adapters_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Compute the adapters in a dtype, from weights that stay in their own: the numbers of weights kept in that dtype,
    but gradients and optimizer steps of the weights' dtype."""

    def linear(x: Tensor, *, layer: nn.Linear) -> Tensor:
        return nn.functional.linear(x.to(dtype), layer.weight.to(dtype))

    for _, adapted in _layers(module):
        # peft would cast the input to the weights' dtype first.
        adapted.cast_input_dtype_enabled = False
        for side in (adapted.lora_A, adapted.lora_B):
            layer = cast(nn.Linear, side[ADAPTER])
            layer.forward = cast("Any", functools.partial(linear, layer=layer))


def lora_names(module: nn.Module) -> dict[str, str]:
    """Names of the adapter's parameters in the module, by their names in an update: `<layer>.lora_A.weight`."""
    return {
        f"{name}.lora_{side}.weight": f"{name}.lora_{side}.{ADAPTER}.weight"
        for name, _ in _layers(module)
        for side in "AB"
    }


def lora_deltas(module: nn.Module) -> dict[str, Delta]:
    """Name in the module of every adapted weight -> what its adapter adds to it."""
    return {
        f"{name}.base_layer.weight": Delta(
            a=f"{name}.lora_A.{ADAPTER}.weight", b=f"{name}.lora_B.{ADAPTER}.weight", scale=layer.scaling[ADAPTER]
        )
        for name, layer in _layers(module)
    }


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names of an adapted module's tensors without adapters -> with them; tensors of adapters are left out."""
    return {name.replace(".base_layer.", "."): name for name in names if ".lora_" not in name}


@contextmanager
def _stand_ins(module: nn.Module, names: Sequence[str], device: torch.device) -> Generator[None]:
    """Within the block layers without values have a weight that takes one element of memory: peft moves a new adapter
    to the device of its layer, and on the meta device would lose its values."""
    layers = [module.get_submodule(name) for name in names]
    empty = [(layer, layer.get_parameter("weight")) for layer in layers if layer.get_parameter("weight").is_meta]
    for layer, weight in empty:
        stand_in = torch.empty(1, dtype=weight.dtype, device=device).expand(weight.shape)
        layer.register_parameter("weight", nn.Parameter(stand_in, requires_grad=False))
    try:
        yield
    finally:
        for layer, weight in empty:
            layer.register_parameter("weight", cast(nn.Parameter, weight))


def _layers(module: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            yield name, part
