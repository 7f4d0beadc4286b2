"""Settings of the qwen-image models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import limit
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

__all__ = ["PATCH", "QwenImageConfig", "QwenImageEditConfig", "QwenImageEditPlusConfig"]

PATCH = 2
"""Side of a patch, in elements of the VAE's latent."""


@dataclass
class QwenImageConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""

    # The transformer rounds the timestep before its sine is taken.
    accelerations: ClassVar[Mapping[str, Acceleration]] = dict.fromkeys(
        ("dtype", "autocast"), Acceleration(scope="both", error={dtype: 2 * error for dtype, error in NARROW.items()})
    )

    def sizes(self, part: Parts) -> Sizes:
        # A latent is the VAE's, in patches.
        unit = PATCH * 2 ** len(part("vae")["temperal_downsample"])
        return Sizes(factor=unit, unit=unit)


@dataclass
class QwenImageEditConfig(QwenImageConfig):
    source_area: int = limit(1024 * 1024, least=1024)
    """Pixels to which a source image is scaled, its ratio kept; the default is the pipeline's. Less trains faster."""
    token_types: bool = True
    """Tell the text encoder which tokens are of images, so that it gives them positions in rows and columns, as in its
    training. False is what diffusers' pipelines do with transformers 5
    (https://github.com/huggingface/diffusers/issues/14194): positions as in a text, and other conditions."""


@dataclass
class QwenImageEditPlusConfig(QwenImageEditConfig):
    condition_area: int = limit(384 * 384, least=1024)
    """The same of the images that the text encoder reads; `source_area` is for the VAE."""
