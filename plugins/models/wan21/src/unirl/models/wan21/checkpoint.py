# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Wan 2.1 in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import WanPipeline
from unirl.core.errors import RecipeError
from unirl.numerics.diffusion.pipeline_files import PipelineFiles
from unirl.numerics.model_files import read_json

__all__ = ["FILES"]

_WAN22 = ("boundary_ratio", "expand_timesteps")
_IMAGE = ("image_dim", "added_kv_proj_dim")
_EXAMPLE = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    settings = read_json(folder / "transformer" / "config.json")
    reasons = [(key, "Wan 2.2") for key in _WAN22 if index.get(key)]
    reasons += [(key, "image to video") for key in _IMAGE if settings.get(key)]
    for key, purpose in reasons:
        raise RecipeError(
            f"model.path: {str(folder)!r} is a checkpoint for {purpose}, by its {key}; expected Wan 2.1 for text to "
            f"video, such as {_EXAMPLE!r}."
        )


FILES = PipelineFiles(
    pipeline=WanPipeline,
    model="wan21",
    title="Wan 2.1",
    example=_EXAMPLE,
    vocabularies=("tokenizer.json", "spiece.model"),
    check=_check,
    hint=f"{_EXAMPLE!r} is in that layout",
)
