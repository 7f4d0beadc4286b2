"""Settings of the flux2-klein model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.diffusion.pipeline_config import PipelineConfig

__all__ = ["Flux2KleinConfig"]


@dataclass
class Flux2KleinConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""
