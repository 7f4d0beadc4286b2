# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Wan 2.1 from a first frame and text, on the components of diffusers' `WanImageToVideoPipeline`."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame, WanFirstFrameFiles

from .checkpoint import VOCABULARIES
from .config import FROM_FRAME, Wan21I2VConfig
from .model import Wan21Model
from .plugin import I2V

__all__ = ["FILES", "Wan21I2VModel", "build"]

FILES = WanFirstFrameFiles(
    pipeline=WanImageToVideoPipeline,
    model="wan21-i2v",
    title="Wan 2.1 I2V",
    example=FROM_FRAME.example,
    vocabularies=VOCABULARIES,
    check=FROM_FRAME.check,
    hint=f"{FROM_FRAME.example!r} is in that layout",
    siblings=FROM_FRAME.siblings,
)


def build(
    config: Wan21I2VConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Wan21I2VModel:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Wan21I2VModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class Wan21I2VModel(WanFirstFrame, Wan21Model):
    """A `unirl.core.roles.DiffusionModel`."""

    spec = I2V
    files = FILES
