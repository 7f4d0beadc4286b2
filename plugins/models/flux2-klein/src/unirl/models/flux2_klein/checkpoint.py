# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of FLUX.2 [klein] in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import Flux2KleinPipeline
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.model_host.model_files import read_json

from .config import EXAMPLE

__all__ = ["FILES", "TEXT_LAYERS"]

TEXT_LAYERS = (9, 18, 27)
"""Layers of the text encoder whose states are the prompt's embeddings."""


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    del index
    if read_json(folder / "transformer" / "config.json").get("guidance_embeds"):
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with guidance_embeds, which takes a guidance scale as an "
            f"input; expected one of FLUX.2 [klein], such as {EXAMPLE!r}."
        )
    layers = read_json(folder / "text_encoder" / "config.json").get("num_hidden_layers", 0)
    if layers < TEXT_LAYERS[-1]:
        raise RecipeError(
            f"model.path: the text encoder in {str(folder)!r} has {layers} layers; the prompt's embeddings are the "
            f"states of layers {', '.join(map(str, TEXT_LAYERS))}."
        )


FILES = PipelineFiles(
    pipeline=Flux2KleinPipeline,
    model="flux2-klein",
    title="FLUX.2 [klein]",
    example=EXAMPLE,
    vocabularies=("tokenizer.json", "vocab.json"),
    check=_check,
    uses_chat_template=True,
)
