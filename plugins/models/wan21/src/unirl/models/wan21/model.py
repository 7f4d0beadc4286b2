# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Wan 2.1 as a diffusion stage, on the components of diffusers' own pipeline."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.numerics.diffusion.wan import WanModel

from .checkpoint import FILES
from .config import Wan21Config
from .plugin import SPEC

__all__ = ["Wan21Model", "build"]


def build(
    config: Wan21Config, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Wan21Model:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Wan21Model(config, device=torch.device(device), lazy=lazy, serves=serves)


class Wan21Model(WanModel):
    """A `unirl.core.roles.DiffusionModel`."""

    spec = SPEC
    files: ClassVar[PipelineFiles] = FILES

    def __init__(
        self, config: Wan21Config, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=self.files.find,
            load=self.files.load,
            transformer=WanTransformer3DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
