"""Loading checkpoints of Wan in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import transformers
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.model_host.model_files import check_parts

from .checkpoints import WanCheckpoints

__all__ = ["pipeline_files"]


def pipeline_files(checkpoints: WanCheckpoints) -> PipelineFiles:
    """Finds and loads the checkpoints of one of the models."""
    return (_FirstFrameFiles if checkpoints.from_frame else PipelineFiles)(
        pipeline=getattr(diffusers, checkpoints.pipeline),
        model=checkpoints.model,
        title=checkpoints.title,
        example=checkpoints.example,
        vocabularies=("tokenizer.json", "spiece.model"),
        check=checkpoints.check,
        parts=(*checkpoints.experts, "vae", "text_encoder", "tokenizer", "scheduler"),
        hint=f"{checkpoints.example!r} is in that layout",
        siblings=checkpoints.siblings,
    )


@dataclass(frozen=True, kw_only=True)
class _FirstFrameFiles(PipelineFiles):
    """Checkpoints with an image encoder or without one."""

    def load(self, folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> Any:
        """Images are scaled with Pillow for the image encoder, as transformers' default is where torchvision is not
        installed. Published checkpoints name the processor of CLIP or its part for images; both have its settings."""
        pipeline = super().load(folder, config, {**parts, "image_processor": None})
        if pipeline.transformer.config.image_dim:
            check_parts(folder, ("image_encoder", "image_processor"))
            if pipeline.image_encoder is None:
                raise RecipeError(
                    f"model.path: the transformer in {str(folder)!r} reads features of images, by its image_dim, and "
                    "model_index.json names no image_encoder. Fetch the whole checkpoint."
                )
            try:
                scaling = transformers.CLIPImageProcessorPil.from_pretrained(
                    folder / "image_processor", local_files_only=True, trust_remote_code=False
                )
            except (OSError, ValueError) as error:
                raise RecipeError(
                    f"model.path: the image_processor in {str(folder)!r} does not load: {error} Fetch the checkpoint "
                    "again."
                ) from error
            pipeline.register_modules(image_processor=scaling)
        return pipeline
