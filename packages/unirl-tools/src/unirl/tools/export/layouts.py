"""The components of a checkpoint, and a complete one in the layout that diffusers and transformers load."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import nn

if TYPE_CHECKING:
    from unirl.core.roles import WeightUpdate

__all__ = ["INDEX", "components_of", "is_pipeline", "open_to_readers", "write_checkpoint"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names."""
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data)(\.index(\.\w+)?\.json)?")
INDEX = "model_index.json"


def is_pipeline(base: Path) -> bool:
    """Whether a checkpoint is in the layout of diffusers, which has a folder for each component."""
    return (base / INDEX).is_file()


def components_of(names: Iterable[str], trained: str, base: Path) -> dict[str, str]:
    """The trained components of a checkpoint: folder -> what the names of its weights begin with.

    names: of weights of the trained module.  trained: its name. Where it has no folder, those of its parts that have
    one; {"": ""} in another layout than diffusers'.
    """
    if not is_pipeline(base):
        return {"": ""}
    if (base / trained).is_dir():
        return {trained: ""}
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    return {part: f"{part}." for part in parts if (base / part).is_dir()}


def write_checkpoint(
    folder: Path,
    update: WeightUpdate,
    *,
    module: nn.Module,
    base: Path,
    components: Mapping[str, str],
    variant: str | None,
    dtype: torch.dtype | None,
) -> None:
    """The base checkpoint with other weights in its trainable components.

    update: `full` or `merged` weights.  module: the trained one with the base weights; it gets the new ones.  base:
    folder of the checkpoint.  components: see `components_of`.  variant: of the weight files.
    dtype: None keeps that of each tensor in the base checkpoint.
    """
    unknown = update.tensors.keys() - module.state_dict().keys()
    assert not unknown, f"{type(module).__name__} has no {min(unknown)!r}"
    for component, start in components.items():
        stored = _stored_dtypes(base / component, variant)
        usual = max(Counter(stored.values()).items(), key=lambda item: item[1], default=(None, 0))[0]
        part = module.get_submodule(start.removesuffix("."))
        for name, tensor in part.state_dict(keep_vars=True).items():
            value = update.tensors.get(start + name, tensor.detach())
            kept = dtype or stored.get(name, usual) or value.dtype
            tensor.data = value.to(kept) if value.is_floating_point() else value
        # transformers and diffusers write the names of their layouts, and split large files.
        cast(Any, part).save_pretrained(folder / component, **({"variant": variant} if variant else {}))
    _copy_rest(folder, base, trained=set(components) - {""})
    if dtype is not None and "" in components:
        _set_dtype(folder / "config.json", str(dtype).removeprefix("torch."))


def open_to_readers(folder: Path) -> None:
    """Give weights the permissions of the card beside them: safetensors keeps new files from other users."""
    for file in folder.rglob("*.safetensors"):
        # A link has the permissions of the base checkpoint.
        if file.stat().st_nlink == 1:
            shutil.copymode(folder / "README.md", file)


def _stored_dtypes(folder: Path, variant: str | None) -> dict[str, torch.dtype]:
    """Dtypes of the weights in a folder, by their names in the files."""
    infix = rf"\.{re.escape(variant)}[^.]*" if variant else ""
    pattern = rf"[^.]+{infix}\.safetensors"
    result: dict[str, torch.dtype] = {}
    for file in sorted(folder.iterdir()):
        if re.fullmatch(pattern, file.name):
            with cast(Any, safe_open(file, framework="pt")) as opened:
                kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
            result |= {name: DTYPES[kind] for name, kind in kinds.items() if kind in DTYPES}
    return result


def _copy_rest(folder: Path, base: Path, *, trained: Collection[str]) -> None:
    """Copy what the base checkpoint has besides the trained components' weights: configs over those that a library
    wrote, weights of other components as hard links where the file system allows it.

    Weights that are in no component, such as those of another format, would be stale and are left out.
    """
    components: Mapping[str, Any] = json.loads((base / INDEX).read_text(encoding="utf-8")) if trained else {}
    for file in sorted(base.rglob("*")):
        place = file.relative_to(base)
        if not file.is_file() or str(place) == "README.md" or any(name.startswith(".") for name in place.parts):
            continue
        first = place.parts[0]
        is_weights = WEIGHTS.fullmatch(file.name) is not None
        if is_weights and (first in trained or first not in components):
            continue
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_weights:
            try:
                # Caches of the hub have links to their files.
                os.link(file.resolve(), target)
                continue
            except OSError:
                pass
        shutil.copyfile(file, target)


def _set_dtype(config: Path, dtype: str) -> None:
    """Write a dtype wherever a config states one."""

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in values.items()}

    text = json.dumps(json.loads(config.read_text(encoding="utf-8"), object_hook=changed), indent=2)
    config.write_text(text + "\n", encoding="utf-8")
