"""What a recipe can set of the qwen-image model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.pipeline_config import PipelineConfig

__all__ = ["QwenImageConfig"]


@dataclass
class QwenImageConfig(PipelineConfig):
    """What every model in the diffusers layout has."""
