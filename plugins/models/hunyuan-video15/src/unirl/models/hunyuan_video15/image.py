# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
"""HunyuanVideo 1.5, image to video: the stage for text with a first frame as a condition.

Source: HunyuanVideo 1.5 technical report, arXiv 2511.18870; verified against diffusers'
`HunyuanVideo15ImageToVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

from .checkpoint import IMAGE_FILES
from .config import HunyuanVideo15ImageConfig
from .frame import HunyuanVideo15Frame
from .model import HunyuanVideo15Model
from .plugin import IMAGE

__all__ = ["HunyuanVideo15ImageModel", "build"]


def build(
    config: HunyuanVideo15ImageConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> HunyuanVideo15ImageModel:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanVideo15ImageModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class HunyuanVideo15ImageModel(HunyuanVideo15Frame, HunyuanVideo15Model):
    """The same with `image_embeds` [n, 729, E], SigLIP's of the first frame, and `first_frame` [n, C, 1, H / 16,
    W / 16], its latents, among the conditions."""

    spec = IMAGE
    files = IMAGE_FILES

    def encode_inputs(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Raises DataError unless each prompt has one image, of which the video's sides show half or more."""
        self._check_served("decode", "VAE", "An engine that encodes source images")
        pipeline = self.pipeline
        embeds: list[Tensor] = []
        latents: list[Tensor] = []
        for name, text, media in zip(inputs.ids, inputs.texts, inputs.media, strict=True):
            image = self.cropped_frame(media, sampling, prompt=f"{name!r} ({text!r})")
            embeds.append(
                pipeline._get_image_embeds(
                    image_encoder=pipeline.image_encoder,
                    feature_extractor=pipeline.feature_extractor,
                    image=image,
                    device=self.device,
                )
            )
            latents.append(
                pipeline._get_image_latents(
                    vae=self.vae,
                    image_processor=pipeline.video_processor,
                    image=image,
                    height=sampling.height,
                    width=sampling.width,
                    device=self.device,
                )
            )
        texts = self.encode_texts(inputs.texts, sampling=sampling)
        return {**texts, "image_embeds": torch.cat(embeds), "first_frame": torch.cat(latents)}

    def image_embeds(self, x: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return conditions["image_embeds"]
