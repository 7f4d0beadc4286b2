"""Checkpoints without weights: only configs and tokenizers, from which models of any size can be planned."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from unirl.core.errors import RecipeError
from unirl.model_host.model_files import check_contained, read_json

__all__ = ["hollow"]

C = TypeVar("C")
LIBRARIES: Mapping[str, str] = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""Library of a component -> name of its weight file."""
PART_BYTES = 2**28
"""Bytes after which a further file begins."""
COPIED_BYTES = 2**26
"""Size of files up to which they are copied whole: configs and tokenizers are smaller."""


@contextmanager
def hollow(config: C, *, key: str, folder: Path) -> Generator[C]:
    """The model's config with a checkpoint that can be opened: the folder itself, or for one that lacks weights
    a copy whose weight files have names and shapes and no values. They are sparse: they take no disk.

    key: config key of the folder. Its components keep their configs and tokenizers. Raises RecipeError for a config
    whose class cannot be built, and as `check_contained` does.
    """
    check_contained(folder)
    missing = {name: which for name, which in _components(folder).items() if not _has_weights(folder / name)}
    if not missing:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="unirl-plan-") as place:
        copy = Path(place) / folder.name
        for name in dict.fromkeys(("", *missing)):
            (copy / name).mkdir()
            for item in (folder / name).iterdir():
                if (name or item.name not in missing) and not item.name.endswith(".index.json"):
                    _copy(item, copy / name / item.name)
        for name, (library, kind) in missing.items():
            _write(copy / name, LIBRARIES[library], _shapes(folder / name, library, kind))
        yield cast("C", dataclasses.replace(cast(Any, config), **{key: str(copy)}))


def _components(folder: Path) -> dict[str, tuple[str, str]]:
    """Subfolder of each component with weights -> its library and class; "" is the folder itself."""
    index = _json(folder / "model_index.json")
    if index:
        parts = {name: value for name, value in index.items() if isinstance(value, list) and value[0] in LIBRARIES}
        return {
            name: (value[0], value[1]) for name, value in parts.items() if (folder / name / "config.json").is_file()
        }
    classes: list[str] = _json(folder / "config.json").get("architectures") or []
    return {"": ("transformers", classes[0])} if classes else {}


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _copy(item: Path, to: Path) -> None:
    """Copy a file or a folder; of large weights the names and shapes alone, because values are not planned with."""
    if item.is_dir() and item.is_symlink():
        # To a folder of the checkpoint, which is copied as well.
        to.symlink_to(os.path.relpath(item.resolve(), item.parent.resolve()))
    elif item.is_dir():
        to.mkdir()
        for child in item.iterdir():
            _copy(child, to / child.name)
    elif (size := item.stat().st_size) <= COPIED_BYTES:
        shutil.copyfile(item, to)
    else:
        with item.open("rb") as opened, to.open("wb") as copied:
            if item.suffix == ".safetensors":
                head = opened.read(8)
                copied.write(head + opened.read(min(int.from_bytes(head, "little"), size)))
            copied.truncate(size)


def _shapes(folder: Path, library: str, kind: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a component, built on the meta device from its config."""
    import torch

    try:
        cls: Any = getattr(import_module(library), kind)
        with torch.device("meta"):
            if library == "diffusers":
                module = cls.from_config(_json(folder / "config.json"))
            else:
                module = cls(cls.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.path: {str(folder)!r} has no weights, and {library}.{kind} cannot be built from its config: {error}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _write(folder: Path, stem: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Safetensors files without data, and their index. Each is small, because readers map a whole file at once."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(map(math.prod, parts[-1].values())) > PART_BYTES:
            parts.append({})
        parts[-1][name] = shape
    places: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"{stem}-{number}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name, shape in part.items():
            begin, end = end, end + math.prod(shape)
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}
            places[name] = file
        text = json.dumps(header).encode()
        # The format: length of the header, the header, and the data, here a hole.
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
