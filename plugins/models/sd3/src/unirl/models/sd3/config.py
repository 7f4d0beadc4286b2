"""Settings of the sd3 model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

__all__ = ["Sd3Config", "Sd3Options"]


@dataclass
class Sd3Config(PipelineConfig):
    use_t5: bool = True
    """Load the T5 encoder, if the checkpoint has one. Without it its embeddings are zeros, as in diffusers."""

    def sizes(self, part: Parts) -> Sizes:
        factor, settings = 2 ** (len(part("vae")["block_out_channels"]) - 1), part("transformer")
        unit = factor * settings["patch_size"]
        return Sizes(factor=factor, unit=unit, largest=settings["pos_embed_max_size"] * unit)


@dataclass
class Sd3Options:
    """`sampling.options` of its images."""

    clip_skip: int = limit(0, least=0)
    """Layers of both CLIP encoders to skip from the end; 0 takes the last but one, as the pipeline does by itself."""
