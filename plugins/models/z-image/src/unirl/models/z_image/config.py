"""Settings of the z-image model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.diffusion.pipeline_config import PipelineConfig

__all__ = ["ZImageConfig"]


@dataclass
class ZImageConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""
