"""Settings shared by all models that are loaded from a checkpoint in the diffusers layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.config import PartConfig

from ..checkpoint_problems import checkpoint_problems, lora_problems
from ..model_files import DTYPES, checkpoint_version, dtype_of

if TYPE_CHECKING:
    import torch
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["PipelineConfig", "pipeline_dtypes"]


@dataclass
class PipelineConfig(PartConfig):
    """A model plugin subclasses it to add its own settings."""

    path: str = "???"
    """Folder in the diffusers layout, or a hub id such as the one in the README of the model's package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16`; None takes the default files."""
    dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the transformer's weights and of its inputs: `float32`, `bfloat16` or `float16`."""
    autocast: str | None = one_of(*DTYPES, default=None)
    """Run the transformer under autocast to this dtype, keeping float32 master weights; None turns autocast off."""
    text_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the text encoders, and therefore of the prompt embeddings."""
    vae_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the VAE. Half precision can show as banding in the images."""
    decode_batch: int = limit(8, least=0)
    """Images or videos per VAE call; 0 decodes all at once."""
    vae_tiling: bool = False
    """Decode and encode images and videos larger than a tile in overlapping tiles, which bounds the memory and changes
    pixels slightly, as `pipeline.vae.enable_tiling()` of diffusers does. Tile sizes are those of the VAE's class."""

    rounding_only = ("decode_batch",)

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """What the files of a local checkpoint rule out."""
        yield from super().problems(plan, stage)
        yield from checkpoint_problems(self.path)
        yield from lora_problems(self, plan, stage)

    def read_versions(self) -> Mapping[str, str]:
        """Version of the checkpoint, if it is in a local folder."""
        version = checkpoint_version(self.path)
        return {".path": version} if version else {}


def pipeline_dtypes(
    config: PipelineConfig, *, model: str, encoders: Sequence[str], transformers: Sequence[str] = ("transformer",)
) -> dict[str, torch.dtype]:
    """Dtype of each component, as diffusers' `from_pretrained` takes them; fp32 for components without a setting.

    encoders, transformers: names of the text encoders and of the components that train.
    Raises RecipeError for an invalid dtype.
    """
    import torch

    text = dtype_of(config.text_dtype, key="model.text_dtype", model=model)
    return {
        **dict.fromkeys(transformers, dtype_of(config.dtype, key="model.dtype", model=model)),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype", model=model),
        **dict.fromkeys(encoders, text),
        "default": torch.float32,
    }
