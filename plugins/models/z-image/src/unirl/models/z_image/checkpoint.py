# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Z-Image in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import ZImagePipeline
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.model_host.model_files import read_json

__all__ = ["FILES"]

_EXAMPLE = "Tongyi-MAI/Z-Image"


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    del index
    if read_json(folder / "transformer" / "config.json").get("siglip_feat_dim"):
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with siglip_feat_dim, which takes images besides the "
            f"prompt; expected one for text to image, such as {_EXAMPLE!r}."
        )


FILES = PipelineFiles(
    pipeline=ZImagePipeline,
    model="z-image",
    title="Z-Image",
    example=_EXAMPLE,
    vocabularies=("tokenizer.json", "vocab.json"),
    check=_check,
    uses_chat_template=True,
)
