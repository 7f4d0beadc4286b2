"""Settings of the qwen-image model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.numerics.diffusion.pipeline_config import PipelineConfig

__all__ = ["QwenImageConfig"]


@dataclass
class QwenImageConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""
