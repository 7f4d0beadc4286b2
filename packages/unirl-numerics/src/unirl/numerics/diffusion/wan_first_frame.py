"""Wan from a first frame and text: the same stage with the frame as a condition of every forward.

Source: Wan technical report, arXiv 2503.20314; verified against diffusers' `WanImageToVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.model_host.model_files import check_parts

from .wan import WanModel
from .wan_source import WanSource

__all__ = ["WanFirstFrame", "WanFirstFrameFiles"]


@dataclass(frozen=True, kw_only=True)
class WanFirstFrameFiles(PipelineFiles):
    """Checkpoints of a `WanImageToVideoPipeline`, with an image encoder or without one."""

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
            processor: Any = import_module("transformers").CLIPImageProcessorPil
            try:
                scaling = processor.from_pretrained(folder / "image_processor", local_files_only=True)
            except (OSError, ValueError) as error:
                raise RecipeError(
                    f"model.path: the image_processor in {str(folder)!r} does not load: {error} Fetch the checkpoint "
                    "again."
                ) from error
            pipeline.register_modules(image_processor=scaling)
        return pipeline


class WanFirstFrame(WanSource, WanModel):
    """What a model adds to its text-to-video class, as a base class before it.

    Conditions: `prompt_embeds` as in `WanModel`; `source` [n, 4 + C, 1 + (F - 1) / 4, H / 8, W / 8] fp32, the mask of
    given frames and the latents of a video of the first frame with grey ones behind it; with an image encoder also
    `image_embeds` [n, S, D], its features of the frame. All of them are in guidance's negative branch, too.
    """

    def encode_inputs(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """The frame is stretched to the size of the video, as the pipeline does.

        Raises DataError unless each input has one source image that can be read, in the ratio of the video up to 5 %,
        and RecipeError for a length of prompts at which the transformer would take text for image features.
        """
        self._check_served("decode", "VAE", "An engine that encodes first frames")
        # Refuses sizes that are off the grid, before the VAE does.
        self.latent_shape(sampling)
        if self._reads_features:
            self.check_length(sampling)
        frames = [
            self.first_frame(media, sampling, prompt=f"{name!r} ({text!r})")
            for name, text, media in zip(inputs.ids, inputs.texts, inputs.media, strict=True)
        ]
        result: dict[str, Ragged] = dict(self.encode_texts(inputs.texts, sampling=sampling))
        result["source"] = torch.cat(
            [self.source(frame, sampling, vae=self.vae, device=self.device) for frame in frames]
        )
        if self._reads_features:
            result["image_embeds"] = torch.cat([self.pipeline.encode_image(frame, self.device) for frame in frames])
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = super().arguments(x, conditions)
        source = conditions["source"]
        result["hidden_states"] = torch.cat([x, source.to(x)], dim=1).to(self.compute_dtype)
        if "image_embeds" in conditions:
            result["encoder_hidden_states_image"] = conditions["image_embeds"].to(self.compute_dtype)
        return result

    @property
    def _reads_features(self) -> bool:
        settings: Any = self.transformer.config
        return bool(settings.image_dim)
