"""Settings of the Qwen-VL models."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.model_host.tokens.image_lm_config import ImageLmConfig

__all__ = ["QwenVlConfig"]


@dataclass
class QwenVlConfig(ImageLmConfig):
    """Those of every model in the transformers layout that reads images."""
