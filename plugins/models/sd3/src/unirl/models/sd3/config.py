"""Settings of the sd3 model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.numerics.diffusion.pipeline_config import PipelineConfig

__all__ = ["Sd3Config"]


@dataclass
class Sd3Config(PipelineConfig):
    use_t5: bool = True
    """Load the T5 encoder, if the checkpoint has one. Without it its embeddings are zeros, as in diffusers."""
