# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Wan 2.2 as a diffusion stage, on the components of diffusers' own pipeline: two experts, one policy."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.numerics.diffusion.wan import WanModel

from .checkpoint import FILES
from .config import Wan22Config
from .experts import Experts
from .plugin import SPEC

__all__ = ["Wan22Model", "build"]

_NAMES = {"high": "transformer", "low": "transformer_2"}


def build(
    config: Wan22Config, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Wan22Model:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Wan22Model(config, device=torch.device(device), lazy=lazy, serves=serves)


class Wan22Model(WanModel):
    """A `unirl.core.roles.DiffusionModel`. Rows of a batch may be of different noise."""

    spec = SPEC
    files: ClassVar[PipelineFiles] = FILES
    experts = ("transformer", "transformer_2")

    def __init__(
        self, config: Wan22Config, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
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
        self.boundary: float = self.pipeline.config.boundary_ratio
        self.denoisers = Experts(self.transformer, self.pipeline.transformer_2, boundary=self.boundary)
        self.denoisers.eval()
        self._trained = tuple(_NAMES) if config.experts == "both" else (config.experts,)
        for noise, name in _NAMES.items():
            self.denoisers.get_submodule(name).requires_grad_(noise in self._trained)

    @property
    def trainable(self) -> torch.nn.Module:
        return self.denoisers

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """See `PipelineModel`. Raises RecipeError, too, where no step is of an expert that alone is trained."""
        sigmas = super().schedule(sampling)
        is_high = sigmas[:-1] >= self.boundary
        if not (is_high if "high" in self._trained else ~is_high).any():
            raise RecipeError(
                f"model.experts: got {self._trained[0]!r}, but none of the {len(is_high)} steps has "
                f"{'at least' if 'high' in self._trained else 'less than'} sigma {self.boundary:g}, so nothing would "
                "be trained. Take more steps, or another shift."
            )
        return sigmas
