"""Settings shared by all language models that read images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unirl.core.limits import limit

from .causal_lm_config import CausalLmConfig

__all__ = ["ImageLmConfig"]


@dataclass
class ImageLmConfig(CausalLmConfig):
    """Settings of every language model in the transformers layout, and of its images."""

    train_vision: bool = False
    """Train the vision tower and its projection along with the language model; they are frozen by default. With LoRA
    they get adapters, too."""
    min_pixels: int = limit(0, least=0)
    """Fewest pixels of an image, which is scaled up to them; 0 is the checkpoint's. For image processors that have a
    budget of pixels, such as those of Qwen-VL."""
    max_pixels: int = limit(0, least=0)
    """Most pixels of an image, which is scaled down to them; 0 is the checkpoint's."""
    image: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further settings of the checkpoint's image processor, by its own names, such as `{do_image_splitting: false}`."""
