"""LoRA adapters through peft: choosing layers, switching them on or off, exporting their weights."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from unirl.core.errors import RecipeError

from .config import LoraSettings
from .export import Delta

__all__ = ["add_lora", "lora_deltas", "lora_names", "plain_names", "switch_lora"]

ADAPTER = "default"
_FULL = "Adapters are for torch.nn.Linear alone; name such layers, or train all weights with backend.trains=full"


def add_lora(
    module: nn.Module, settings: LoraSettings, *, default_targets: Sequence[str], seed: int, device: torch.device
) -> int:
    """Add adapters to the target linear layers, in place; only they are trained. Returns the number of layers.

    The adapters are fp32 and initialised from `seed` alone, so they are the same on every rank, and whether or not the
    weights below them have values yet. Layers whose weight the model has frozen get none.
    Raises RecipeError when a target matches no linear layer, or one that peft refuses for the architecture.
    """
    names = _matched(module, list(settings.targets) or list(default_targets))
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


def _matched(module: nn.Module, targets: Sequence[str]) -> list[str]:
    name_of_class = type(module).__name__
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not targets:
        # Those of blocks, which are numbered.
        endings = sorted({name.split(".")[-1] for name in linear if re.search(r"\.\d+\.", name)})
        listed = f"List endings of its linear layers: {', '.join(endings)}"
        raise RecipeError(
            f"backend.lora.targets: got none, and the model has no default targets in {name_of_class}. "
            f"{listed if endings else _FULL}."
        )
    matched: list[str] = []
    for target in targets:
        all_names = [name for name in linear if _ends(name, target)]
        names = [name for name in all_names if module.get_parameter(f"{name}.weight").requires_grad]
        if all_names and not names:
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches {len(all_names)} layers of {name_of_class}, such as "
                f"{all_names[0]!r}, and the model has frozen all of them. Leave it out, or name layers that may train."
            )
        if not names:
            others = sorted({type(part).__name__ for name, part in module.named_modules() if _ends(name, target)})
            endings = sorted({".".join(name.split(".")[-depth:]) for name in linear for depth in (1, 2, 3)})
            near = difflib.get_close_matches(target, endings, n=5, cutoff=0.3) or endings[:5]
            nearest = f"Nearest: {', '.join(near) or 'it has no linear layers'}"
            raise RecipeError(
                f"backend.lora.targets: {target!r} matches no linear layer of {name_of_class}"
                f"{f', but {others[0]}. {_FULL}' if others else f'. {nearest}'}."
            )
        matched += [name for name in names if name not in matched]
    return matched


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
