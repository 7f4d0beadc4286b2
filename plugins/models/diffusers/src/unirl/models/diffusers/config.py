"""Settings of the generic diffusion model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unirl.numerics.diffusion.pipeline_config import PipelineConfig

__all__ = ["DiffusersConfig"]


@dataclass
class DiffusersConfig(PipelineConfig):
    call: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the pipeline's call, such as `guidance_scale: 3.5` of a model with embedded guidance."""
