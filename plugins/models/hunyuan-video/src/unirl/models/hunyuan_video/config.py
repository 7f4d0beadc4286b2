"""Settings of the hunyuan-video model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.model_host.diffusion.pipeline_config import PipelineConfig

__all__ = ["HunyuanVideoConfig", "HunyuanVideoOptions"]


@dataclass
class HunyuanVideoConfig(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""


@dataclass
class HunyuanVideoOptions:
    """`sampling.options` of its videos."""

    embedded_guidance: float = limit(6.0, least=0, most=1000)
    """Guidance scale that the transformer is told; the default is the pipeline's."""
