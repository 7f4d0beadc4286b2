"""Random adapters, their files in the layouts of `unirl export`, and what a reader makes of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from unirl.core.roles import WeightUpdate
from unirl.core.specs.spec import AdapterLayout, ModelSpec
from unirl.tools.export.adapters import write_named_adapters

__all__ = ["RANK", "adapters_of", "changes_of", "check_equal", "read", "written"]

SCALE, RANK = 1.5, 2
ROUNDING = 2e-6
"""A change is a sum of at most 8 fp32 products, rounded to 6e-8 each, relative to the largest of a matrix; folding the
scale into one factor rounds once more. Several times as much leaves room for every instruction set."""


def adapters_of(module: Any, layers: str) -> WeightUpdate:
    """Random adapters of the linear layers with these names."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and re.fullmatch(layers, name):
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, part.in_features, generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(part.out_features, RANK, generator=generator)
    assert tensors
    return WeightUpdate(version=0, tensors=tensors, kind="lora", adapter_scale=SCALE)


def probed(down: Tensor) -> Tensor:
    """A matrix times the unit vectors; where those are many, times two others, the same for each width."""
    width = down.shape[1]
    probe = torch.eye(width) if width <= 512 else torch.randn(width, 2, generator=torch.Generator().manual_seed(width))
    return down @ probe


def changes_of(update: WeightUpdate) -> dict[str, Tensor]:
    """The change of each weight, by its name in the module: scale B A."""
    return {
        f"{name.removesuffix('.lora_A.weight')}.weight": SCALE
        * (update.tensors[name.replace("lora_A", "lora_B")] @ probed(down))
        for name, down in update.tensors.items()
        if ".lora_A." in name
    }


def read(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The change of each weight by a file: (alpha / rank) up down, and alpha = rank without one, as every reader has
    it. Both pairs of names mean the same. Each tensor counts."""
    result: dict[str, Tensor] = {}
    used: set[str] = set()
    for a, b in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
        for name, down in tensors.items():
            if name.endswith(f".{a}.weight"):
                layer = name.removesuffix(f".{a}.weight")
                up, alpha = tensors[f"{layer}.{b}.weight"], tensors.get(f"{layer}.alpha", torch.tensor(len(down)))
                assert layer.startswith(prefix)
                used |= {name, f"{layer}.{b}.weight", f"{layer}.alpha"}
                result[f"{layer.removeprefix(prefix)}.weight"] = alpha.item() / len(down) * (up @ probed(down))
    assert tensors.keys() <= used
    return result


def check_equal(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Both change the same weights in the same way. Weights that a converter adds have none."""
    for name, value in result.items():
        if name not in expected:
            assert not value.any(), name
    for name, value in expected.items():
        assert (result[name] - value).abs().max() <= ROUNDING * value.abs().max(), name


def written(
    layout: AdapterLayout, update: WeightUpdate, to: Path, *, spec: ModelSpec, module: Any, base: Path
) -> dict[str, Tensor]:
    """A file of adapters of the component `transformer` at `to`."""
    write_named_adapters(
        to.with_suffix(""),
        update,
        layout=layout,
        spec=spec,
        module=module,
        components={"transformer": ""},
        base=base,
        dtype=torch.float32,
        metadata={},
    )
    return load_file(to)
