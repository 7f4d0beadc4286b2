"""Settings of the z-image model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

__all__ = ["PATCH", "ZImageConfig"]

PATCH = 2
"""Side of a token, in elements of a latent."""


@dataclass
class ZImageConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""

    def sizes(self, part: Parts) -> Sizes:
        factor = 2 ** (len(part("vae")["block_out_channels"]) - 1)
        unit = factor * PATCH
        return Sizes(factor=factor, unit=unit, largest=min(part("transformer")["axes_lens"][1:]) * unit)
