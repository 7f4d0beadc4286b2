"""What a recipe can set of any model that is loaded from a checkpoint in the diffusers layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import PartConfig
from .model_files import wrong_dtypes

__all__ = ["PipelineConfig", "pipeline_settings"]


@dataclass
class PipelineConfig(PartConfig):
    """A model's plugin derives from it for what it has besides."""

    path: str = "???"
    """Folder in the diffusers layout, or a hub id, such as that in the README of the model's dist."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16`; None is the plain ones."""
    dtype: str = "float32"
    """Dtype of the transformer's weights and of its inputs: `float32`, `bfloat16` or `float16`."""
    autocast: str | None = None
    """Run the transformer under autocast to this dtype, so that float32 weights stay as masters; None is off."""
    text_dtype: str = "float32"
    """Dtype of the text encoders, and so of the conditions."""
    vae_dtype: str = "float32"
    """Dtype of the VAE. Half precision shows as banding in the images."""
    decode_batch: int = 8
    """Images per call of the VAE; 0 decodes all at once."""


def pipeline_settings(config: PartConfig) -> Iterator[tuple[str, str]]:
    """Why the settings of such a model cannot be: key path and sentence of each reason; none for any other model."""
    if not isinstance(config, PipelineConfig):
        return
    yield from wrong_dtypes(config, "dtype", "autocast", "text_dtype", "vae_dtype")
    if config.decode_batch < 0:
        yield "model.decode_batch", f"{config.decode_batch} was asked for; it must be 0 or more."
