"""Changes that tests make to diffusers and transformers, in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from transformers import Qwen2VLProcessor, Qwen3VLProcessor

__all__ = ["small_images"]

LENGTH = 512
"""Tokens, a byte each, of a prompt in the template of HunyuanVideo 1.5, after the 108 that it drops: 114 of the prompt."""


@contextmanager
def small_images() -> Iterator[None]:
    """Qwen-Image's editing scales its sources to 1024 x 1024 pixels, ours and diffusers' own runs alike: seconds a
    forward. And its processor has a part for videos, which it never uses, but which needs torchvision. HunyuanVideo 1.5
    pads a prompt to 1000 tokens and adds 729 of an image that it does not have: many times those of the video."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Qwen2VLProcessor, Qwen3VLProcessor):
            patch.setattr(kind, "get_attributes", classmethod(lambda cls: ["image_processor", "tokenizer"]))
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage21):
            own = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, own=own: own(min(area, 128 * 128), ratio))
        patch.setattr(HunyuanVideo15Pipeline, "__init__", _shorter(HunyuanVideo15Pipeline.__init__))
        yield


def _shorter(made: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(made)  # components are found in its arguments
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.tokenizer_max_length, self.vision_num_semantic_tokens = LENGTH, 9

    return init
