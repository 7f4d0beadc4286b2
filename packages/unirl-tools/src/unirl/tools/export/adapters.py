"""LoRA adapters in the layouts of diffusers, peft, ComfyUI, kohya's trainers and original checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from unirl.core.errors import PluginBroken, RecipeError
from unirl.core.specs.spec import AdapterLayout
from unirl.model_host.model_files import read_json

from .layouts import INDEX

if TYPE_CHECKING:
    from unirl.core.roles import WeightUpdate
    from unirl.core.specs.spec import AdapterNames, ModelSpec

__all__ = ["Layout", "layouts_of", "rank_of", "write_diffusers_adapters", "write_named_adapters", "write_peft_adapters"]

Layout = Literal["diffusers", "peft"] | AdapterLayout

PREFIX: Mapping[AdapterLayout, str] = {"comfy": "diffusion_model.", "kohya": "lora_unet_", "original": ""}
"""ComfyUI keeps a model under this name, and kohya's trainers begin the names of adapters of a denoiser like that."""


def layouts_of(spec: ModelSpec, *, is_pipeline: bool) -> tuple[Layout, ...]:
    """The layouts that a model's adapters can have; the first is the default."""
    if not is_pipeline:
        return ("peft",)
    return ("diffusers", "peft", *(name for name in get_args(AdapterLayout) if name in spec.adapter_layouts))


def rank_of(update: WeightUpdate) -> int:
    """Rank of the adapters, the same in every layer."""
    return next(len(tensor) for name, tensor in update.tensors.items() if ".lora_A." in name)


def write_diffusers_adapters(
    folder: Path,
    update: WeightUpdate,
    *,
    components: Mapping[str, str],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """LoRA adapters for `load_lora_weights`, a file for each component that has any: `pytorch_lora_weights`, and for
    one called `transformer_2` `pytorch_lora_weights_2`, to be loaded with `load_into_transformer_2=True`.

    update: `lora` weights.  components: see `components_of`.  metadata: of the files.
    """
    for component, tensors in _by_component(update, components):
        place, suffix = cast("re.Match[str]", re.fullmatch(r"(.*?)(_\d+)?", component)).groups(default="")
        _save(
            {f"{place}.{name}": tensor for name, tensor in _scaled(tensors, update).items()},
            folder / f"pytorch_lora_weights{suffix}.safetensors",
            dtype=dtype,
            metadata=metadata,
        )


def write_peft_adapters(
    folder: Path,
    update: WeightUpdate,
    *,
    module: nn.Module | None,
    components: Mapping[str, str],
    base: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """LoRA adapters for peft; of several components each in a folder of its own.

    update: `lora` weights.  module: the adapted one; without it layers are listed by their whole names.  components:
    see `components_of`.  base: the checkpoint, by name.  metadata: of the files.
    """
    rank = rank_of(update)
    for component, tensors in _by_component(update, components):
        part = None if module is None else module.get_submodule(components[component].removesuffix("."))
        place = folder / component if len(components) > 1 else folder
        place.mkdir(exist_ok=True)
        layers = {name.partition(".lora_")[0] for name in tensors}
        endings = {name.rpartition(".")[2] for name in layers}
        modules = () if part is None else part.named_modules()
        are_enough = {name for name, _ in modules if name.rpartition(".")[2] in endings} == layers
        config = {
            "peft_type": "LORA",
            "task_type": None if component else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": update.adapter_scale * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(endings if are_enough else layers),
        }
        (place / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _save(
            {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
            place / "adapter_model.safetensors",
            dtype=dtype,
            metadata=metadata,
        )


def write_named_adapters(
    file: Path,
    update: WeightUpdate,
    *,
    layout: AdapterLayout,
    spec: ModelSpec,
    module: nn.Module,
    components: Mapping[str, str],
    base: Path,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """LoRA adapters with the names of another implementation of the model, in one file.

    Of several components each has its own, with the component in its name, or high_noise and low_noise for the experts
    of a pipeline that changes between them at a noise level.

    file: without its ending.  update: `lora` weights.  spec, module: of the adapted one.  components: see
    `components_of`.  base: folder of the checkpoint.  metadata: of the files.
    Raises RecipeError for an adapted layer without a name in the layout.
    """
    names = _names(spec, layout)
    experts = {"transformer": "high_noise", "transformer_2": "low_noise"}
    ends = experts if read_json(base / INDEX).get("boundary_ratio") is not None else {}
    for component, tensors in _by_component(update, components):
        part = module.get_submodule(components[component].removesuffix("."))
        written: dict[str, Tensor] = {}
        for place, (down, up) in _placed(_scaled(tensors, update), names, module=part, layout=layout).items():
            if layout == "kohya":
                layer = PREFIX[layout] + place.replace(".", "_")
                written |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
                # The scale is in the weights already, and readers divide this by the rank.
                written[f"{layer}.alpha"] = torch.tensor(float(len(down)))
            else:
                layer = PREFIX[layout] + place
                written |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        end = f"_{ends.get(component, component)}" if len(components) > 1 else ""
        _save(written, file.with_name(f"{file.name}{end}.safetensors"), dtype=dtype, metadata=metadata)


def _names(spec: ModelSpec, layout: AdapterLayout) -> AdapterNames:
    where = spec.adapter_layouts[layout]
    module, _, attribute = where.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginBroken(
            f"model {spec.name!r} names {where!r} for layout {layout!r}, expected 'package.module:attribute': {error}"
        ) from error


def _by_component(update: WeightUpdate, components: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each component that has adapters, with them by their names in it."""
    for component, start in components.items():
        tensors = {
            name.removeprefix(start): tensor for name, tensor in update.tensors.items() if name.startswith(start)
        }
        if tensors:
            yield component, tensors


def _scaled(tensors: Mapping[str, Tensor], update: WeightUpdate) -> dict[str, Tensor]:
    """The adapters with their scale in B: readers without metadata take alpha = rank."""
    return {name: tensor * (update.adapter_scale if ".lora_B." in name else 1.0) for name, tensor in tensors.items()}


def _placed(
    tensors: Mapping[str, Tensor], names: AdapterNames, *, module: nn.Module, layout: AdapterLayout
) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer of the layout -> A [rank, in] and B [out, rank] of its adapter.

    Of a layer that is fused of several, A has those of its adapted parts one below the other, and B theirs along the
    diagonal, so that B A has the rows of each part: the rank is that of an adapter times the number of such parts.
    """
    places = dict(_place(name.partition(".lora_")[0], names, layout=layout) for name in tensors)
    result: dict[str, tuple[Tensor, Tensor]] = {}
    for place, parts in places.items():
        downs = [tensors[f"{part}.lora_A.weight"] for part in parts if f"{part}.lora_A.weight" in tensors]
        ups: list[Tensor] = []
        for part in parts:
            rows = cast(Any, module.get_submodule(part)).out_features
            ups.append(tensors.get(f"{part}.lora_B.weight", torch.zeros(rows, 0)))
        result[place] = torch.cat(downs), torch.block_diag(*ups)
    return result


def _place(layer: str, names: AdapterNames, *, layout: AdapterLayout) -> tuple[str, tuple[str, ...]]:
    """The layer of the layout that a layer of the module is part of, and all of its parts."""
    for place, parts in names.items():
        for part in parts:
            if found := re.fullmatch(re.escape(part).replace(r"\{\}", "(.+)"), layer):
                return place.format(*found.groups()), tuple(name.format(*found.groups()) for name in parts)
    raise RecipeError(
        f"--layout: layer {layer!r} has an adapter, but no name in layout {layout!r}, which names the layers "
        f"{', '.join(name for parts in names.values() for name in parts)}. Export it with --layout diffusers, or train "
        "without it (backend.lora.targets)."
    )


def _save(tensors: Mapping[str, Tensor], file: Path, *, dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
    # An alpha stays in fp32: 16 bits have not every rank.
    saved = {name: (tensor.to(dtype) if tensor.ndim else tensor).contiguous() for name, tensor in tensors.items()}
    save_file(saved, file, metadata={"format": "pt", **metadata})
