"""Qwen2.5-VL and Qwen3-VL as decoders of tokens that see images, on transformers' own classes.

Source: Qwen2.5-VL, arXiv 2502.13923; Qwen3-VL, arXiv 2511.21631. Verified against transformers'
`Qwen2_5_VLForConditionalGeneration` and `Qwen3VLForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from unirl.core.specs.spec import ModelSpec
from unirl.model_host.tokens.image_lm import ImageLmModel

from .config import QwenVlConfig
from .plugin import QWEN3, SPEC
from .vision_lm import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

__all__ = ["QwenVlModel", "build", "build_qwen3"]

_ARCHITECTURES = {
    Qwen2_5_VLForConditionalGeneration.__name__: SPEC.name,
    Qwen3VLForConditionalGeneration.__name__: QWEN3.name,
}


class QwenVlModel(ImageLmModel):
    """A `unirl.core.roles.TextModel`. Conditions, of each input: `pixel_values` [P, D] fp32, the patches of its
    images as the checkpoint's processor makes them, and `image_grid_thw` [images, 3] int64, patches per dim.
    """

    example = "Qwen/Qwen2.5-VL-3B-Instruct"
    # Of Qwen2.5-VL, as it is published.
    renames: ClassVar[Mapping[str, str]] = {
        r"visual\.": "model.visual.",
        r"model\.(?!language_model\.|visual\.)": "model.language_model.",
    }


def build(config: QwenVlConfig, *, device: Any, lazy: bool = False) -> QwenVlModel:
    """A Qwen2.5-VL. Raises RecipeError when the checkpoint or a setting is wrong."""
    return _build(config, device=device, lazy=lazy, spec=SPEC, cls=Qwen2_5_VLForConditionalGeneration)


def build_qwen3(config: QwenVlConfig, *, device: Any, lazy: bool = False) -> QwenVlModel:
    """A dense Qwen3-VL. Raises RecipeError when the checkpoint or a setting is wrong."""
    return _build(config, device=device, lazy=lazy, spec=QWEN3, cls=Qwen3VLForConditionalGeneration)


def _build(config: QwenVlConfig, *, device: Any, lazy: bool, spec: ModelSpec, cls: Any) -> QwenVlModel:
    return QwenVlModel(config, device=torch.device(device), lazy=lazy, spec=spec, cls=cls, siblings=_ARCHITECTURES)
