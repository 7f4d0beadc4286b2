"""Settings of the wan21 model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.numerics.diffusion.pipeline_config import PipelineConfig

__all__ = ["Wan21Config"]


@dataclass
class Wan21Config(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""
