"""The generic model of a checkpoint's layout, and what its folder and its plugin say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.model_host.model_files import check_contained

__all__ = ["build_generic", "checkpoint_license", "generic_model", "outside_requirements", "readable"]


def generic_model(folder: Path) -> str:
    """Name of the generic model that loads the checkpoint in this folder."""
    if not folder.is_dir():
        raise RecipeError(
            f"--from: there is no folder {str(folder)!r}; expected the folder of a diffusers or transformers "
            "checkpoint. Download it from the hub first."
        )
    # Its small files become those of the plugin.
    check_contained(folder, key="--from")
    if (folder / "model_index.json").is_file():
        return "diffusers"
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"--from: {str(folder)!r} has no model_index.json and no config.json, so it is not a checkpoint in the "
            "layout of diffusers or of transformers. Give the folder that holds one of them."
        )
    try:
        named = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise RecipeError(
            f"--from: {str(folder / 'config.json')!r} cannot be read as a JSON object: {error}"
        ) from error
    return "causal-lm" if any(str(name).endswith("ForCausalLM") for name in named) else "vlm"


def build_generic(folder: Path, generic: str, *, catalog: Catalog, lazy: bool = False) -> Any:
    """The checkpoint as the generic model builds it on the CPU. Raises RecipeError with its reason."""
    spec: Any = catalog.get("model", generic).spec
    config = catalog.resolve(spec.config)(path=str(folder))
    try:
        return catalog.resolve(spec.build)(config, device="cpu", **({"lazy": True} if lazy else {}))
    except RecipeError as error:
        raise RecipeError(f"--from: model={generic} refuses it. {error}") from error


def outside_requirements(generic: str, *, catalog: Catalog) -> tuple[str, ...]:
    """Requirements of the generic model's dist besides UniRL, with their bounds."""
    lines = requires(catalog.get("model", generic).dist) or []
    parsed = [Requirement(line) for line in lines]
    return tuple(str(each) for each in parsed if not each.name.startswith("unirl-") and each.marker is None)


def checkpoint_license(folder: Path) -> str:
    """License in the model card, or the first line of its LICENSE file."""
    card = folder / "README.md"
    if card.is_file():
        front = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", errors="replace"), flags=re.DOTALL)
        values: Mapping[str, str] = dict(
            re.findall(r"^(license(?:_name)?):\s*(\S+)\s*$", front[1], re.M) if front else []
        )
        if "license" in values:
            return values.get("license_name", values["license"]).strip("'\"")
    for file in sorted(folder.glob("LICENSE*")):
        lines = [line.strip() for line in file.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        if lines:
            return f"see its {file.name}: {lines[0]}"
    return "not stated in the folder"


def readable(number: int) -> str:
    """A count as people say it: 1.2 M."""
    for bound, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= bound:
            return f"{number / bound:.2g} {unit}" if number < 100 * bound else f"{number // bound} {unit}"
    return str(number)
