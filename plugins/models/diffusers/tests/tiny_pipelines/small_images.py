"""What tests change about diffusers and transformers, in every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from transformers import Qwen2VLProcessor

__all__ = ["small_images"]


@contextmanager
def small_images() -> Iterator[None]:
    """Qwen-Image's editing scales its sources to 1024 x 1024 pixels, ours and diffusers' own runs alike: seconds a
    forward. And its processor has a part for videos, which it never uses, but which needs torchvision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2VLProcessor, "get_attributes", classmethod(lambda cls: ["image_processor", "tokenizer"]))
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            own = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, own=own: own(min(area, 128 * 128), ratio))
        yield
