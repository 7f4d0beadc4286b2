"""LoRA adapters through peft: choosing layers, switching them on or off, exporting their weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from unirl.core.errors import RecipeError

from .config import LoraSettings
from .sharding import full

__all__ = ["add_lora", "lora_parameters", "lora_weights", "merged_weights", "switch_lora"]

ADAPTER = "default"


def add_lora(module: nn.Module, settings: LoraSettings, *, default_targets: Sequence[str], seed: int) -> int:
    """Add adapters to the target linear layers, in place; only they are trained. Returns the number of layers.

    The adapters are fp32 and initialised from `seed` alone, so they are the same on every rank.
    Raises RecipeError when a target matches no linear layer.
    """
    names = _matched(module, list(settings.targets) or list(default_targets))
    module.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(
            LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  (peft divides it by the rank; floats are fine)
                target_modules=names,
                init_lora_weights="gaussian" if settings.init == "gaussian" else True,
            ),
            module,
            ADAPTER,
        )
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return sum(1 for _ in _layers(module))


def switch_lora(module: nn.Module, *, on: bool) -> None:
    """With the adapter off the module is the base model."""
    for _, layer in _layers(module):
        layer.enable_adapters(on)


def lora_weights(module: nn.Module) -> dict[str, Tensor]:
    """Whole adapter weights, named `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Collective."""
    return {name: full(param) for name, param in lora_parameters(module).items()}


def lora_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The live adapter weights, by the names of `lora_weights`."""
    result: dict[str, Tensor] = {}
    for name, layer in _layers(module):
        result[f"{name}.lora_A.weight"] = _weight(layer.lora_A[ADAPTER])
        result[f"{name}.lora_B.weight"] = _weight(layer.lora_B[ADAPTER])
    return result


def merged_weights(module: nn.Module, *, is_on: bool) -> dict[str, Tensor]:
    """Whole weights by the names of the base model, the adapters folded in where `is_on`. Collective.

    W + (B A) alpha / rank, computed in fp32 and rounded once to the dtype of W.
    """
    layers = dict(_layers(module))
    result: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        whole = full(parameter)
        layer_name = name.removesuffix(".base_layer.weight")
        if is_on and layer_name != name:
            layer = layers[layer_name]
            delta = full(_weight(layer.lora_B[ADAPTER])) @ full(_weight(layer.lora_A[ADAPTER]))
            whole = (whole.float() + delta * layer.scaling[ADAPTER]).to(whole.dtype)
        result[name.replace(".base_layer.", ".")] = whole
    return result


def _layers(module: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            yield name, part


def _weight(part: nn.Module) -> Tensor:
    assert isinstance(part, nn.Linear)
    return part.weight


def _matched(module: nn.Module, targets: Sequence[str]) -> list[str]:
    if not targets:
        raise RecipeError(
            "backend.lora.targets: got none, and the model has no default targets; "
            "list endings of its linear layers, such as [to_q,to_k,to_v]."
        )
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    matched: list[str] = []
    for target in targets:
        names = [name for name in linear if name == target or name.endswith("." + target)]
        if not names:
            endings = sorted({".".join(name.split(".")[-depth:]) for name in linear for depth in (1, 2, 3)})
            near = difflib.get_close_matches(target, endings, n=5, cutoff=0.3) or endings[:5]
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches no linear layer of {type(module).__name__}. "
                f"Nearest: {', '.join(near) or 'it has no linear layers'}."
            )
        matched += [name for name in names if name not in matched]
    return matched
