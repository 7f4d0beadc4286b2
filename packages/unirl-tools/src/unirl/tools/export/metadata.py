"""Metadata of exported adapters: what they adapt, and which run made them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.types.sampling import LatentSamplingConfig

from .card import base_license

if TYPE_CHECKING:
    from .adapters import Layout
    from .source import TrainedModel

__all__ = ["adapter_metadata", "base_name", "date_of"]

SPEC_VERSION = "1.0.1"
"""Of https://github.com/Stability-AI/ModelSpec."""
ARCHITECTURES = {
    r"stabilityai/stable-diffusion-3-medium(-diffusers)?": "stable-diffusion-v3-medium",
    r"stabilityai/stable-diffusion-3\.5-medium": "stable-diffusion-v3.5-medium",
    r"stabilityai/stable-diffusion-3\.5-large": "stable-diffusion-v3.5-large",
    r"black-forest-labs/FLUX\.2-klein-(base-)?4B": "Flux.2-klein-4b",
    r"black-forest-labs/FLUX\.2-klein-(base-)?9B": "Flux.2-klein-9b",
    r"Qwen/Qwen-Image(-2512)?": "Qwen-Image",
    r"Qwen/Qwen-Image-Edit": "Qwen-Image-Edit",
    r"Qwen/Qwen-Image-Edit-2509": "Qwen-Image-Edit-Plus",
    r"Qwen/Qwen-Image-Edit-2511": "Qwen-Image-Edit-2511",
    r"Tongyi-MAI/Z-Image(-Turbo)?": "Z-Image",
    r"Wan-AI/Wan2\.[12]-.*-Diffusers": "wan2.1",
    r"hunyuanvideo-community/HunyuanVideo": "hunyuan-video",
    r"hunyuanvideo-community/HunyuanVideo-1\.5-.*": "hunyuan-video-1.5",
}
"""Hub ids -> the architecture by the names of SwarmUI, for SD3, and of musubi-tuner, which calls both Wan the same."""
IMPLEMENTATIONS: Mapping[Layout, str] = {
    "diffusers": "diffusers",
    "peft": "diffusers",
    "comfy": "https://github.com/comfyanonymous/ComfyUI",
}


def base_name(source: TrainedModel, base: Path) -> str:
    """The base checkpoint: its hub id, or the name of its folder, without the path to it."""
    path = Path(str(source.setting("path") or base)).expanduser()
    return path.resolve().name if path.is_dir() else str(source.setting("path"))


def adapter_metadata(
    source: TrainedModel,
    base: Path,
    *,
    step: int,
    date: str | None,
    layout: Layout,
    rank: int,
    is_pipeline: bool,
) -> dict[str, str]:
    """Entries for the header of a file of adapters: of ModelSpec where they are known, of kohya's trainers in their
    layout, and our own. They have no paths.

    base: folder of the base checkpoint.  step, date: of the weights.  rank: of the adapters.
    """
    plan, key = source.plan, source.learner.model.key
    recipe, name = Path(plan.recipe).stem if plan.recipe.endswith(".yaml") else plan.recipe, base_name(source, base)
    digests = [value for where, value in source.recorded.get("files", {}).items() if where == f"{key}.path"]
    sizes = [
        f"{stage.sampling.width}x{stage.sampling.height}"
        for stage in plan.trained
        if stage.learner.name == source.learner.name and isinstance(stage.sampling, LatentSamplingConfig)
    ]
    known = [value for pattern, value in ARCHITECTURES.items() if re.fullmatch(pattern, name)]
    entries: dict[str, str | None] = {
        "modelspec.sai_model_spec": SPEC_VERSION,
        "modelspec.architecture": f"{known[0]}/lora" if known else None,
        "modelspec.implementation": IMPLEMENTATIONS.get(layout) if is_pipeline else "transformers",
        "modelspec.title": f"{plan.run.name or recipe}, step {step}",
        "modelspec.date": date,
        "modelspec.license": base_license(base).get("license"),
        "modelspec.resolution": sizes[0] if sizes else None,
        "ss_network_dim": str(rank) if layout == "kohya" else None,
        "ss_network_alpha": str(rank) if layout == "kohya" else None,
        "unirl.base_model": name,
        "unirl.base_revision": source.setting("revision"),
        "unirl.base_digest": digests[0] if digests else None,
        "unirl.recipe": recipe,
        "unirl.step": str(step),
        "unirl.version": version("unirl-tools"),
    }
    return {key: str(value) for key, value in entries.items() if value}


def date_of(seconds: float) -> str:
    """A time since the epoch as ModelSpec writes it."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="seconds")
