"""Weights as a trainer would send them: a model that was changed, and the update that carries the change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from unirl.core.roles import Model, WeightUpdate
from unirl.core.specs.facts import names_in
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.weights import checksum

__all__ = ["full_update", "layers_by_target", "lora_layers", "lora_update", "perturb", "update_of", "with_adapter"]

RANK = 2


def perturb(model: Model, *, seed: int) -> None:
    """Move every weight of the trained module by noise of a fifth of its spread, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.trainable.parameters():
            spread = float(weight.float().std(correction=0)) or 0.1
            weight.add_((0.2 * spread * torch.randn(weight.shape, generator=generator)).to(weight))


def update_of(
    tensors: Mapping[str, Tensor], *, version: int, kind: Literal["full", "lora", "merged"], scale: float = 1.0
) -> WeightUpdate:
    """An update of these tensors, with their checksum."""
    return WeightUpdate(version=version, tensors=tensors, kind=kind, adapter_scale=scale, checksum=checksum(tensors))


def full_update(model: Model, *, version: int, kind: Literal["full", "merged"] = "full") -> WeightUpdate:
    """All weights of the trained module by their names, as copies."""
    tensors = {name: weight.detach().clone() for name, weight in model.trainable.named_parameters()}
    return update_of(tensors, version=version, kind=kind)


def lora_layers(model: Model, spec: ModelSpec) -> dict[str, nn.Linear]:
    """The linear layers whose names end as the spec's `lora_targets`, by name."""
    matched = {name for names in layers_by_target(model.trainable, spec).values() for name in names}
    assert matched, f"lora_targets {spec.lora_targets} match no linear layer of model {spec.name!r}"
    layers = {name: part for name, part in model.trainable.named_modules() if name in matched}
    return cast("dict[str, nn.Linear]", layers)


def layers_by_target(module: nn.Module, spec: ModelSpec) -> dict[str, list[str]]:
    """Names of the linear layers that each of the spec's `lora_targets` matches."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return {
        target: [name for name in linear if f".{name}".endswith(f".{target}")]
        for target in names_in(spec.lora_targets, module)
    }


def lora_update(
    model: Model, spec: ModelSpec, *, version: int, seed: int, scale: float
) -> tuple[WeightUpdate, dict[str, Tensor]]:
    """A random adapter for every layer that LoRA adapts, named as peft names it inside the trained module, and what it
    adds to each layer's weight: scale B A."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for name, layer in lora_layers(model, spec).items():
        outputs, inputs = layer.weight.shape
        a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, RANK, generator=generator) * 0.3
        device = layer.weight.device
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a.to(device), b.to(device)
        added[name] = (scale * b.double() @ a.double()).to(device)
    return update_of(tensors, version=version, kind="lora", scale=scale), added


def with_adapter(model: Model, added: Mapping[str, Tensor]) -> Model:
    """The same model with these additions to the weights of its layers, in place."""
    with torch.no_grad():
        for name, delta in added.items():
            weight = model.trainable.get_submodule(name).get_parameter("weight")
            weight.copy_((weight.double() + delta).to(weight.dtype))
    return model
