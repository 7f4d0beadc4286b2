# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
"""HunyuanVideo 1.5, image to video: the stage for text with a first frame as a condition.

Source: HunyuanVideo 1.5 technical report, arXiv 2511.18870; verified against diffusers'
`HunyuanVideo15ImageToVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from unirl.core.errors import DataError
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.media import load_picture

from .checkpoint import IMAGE_FILES
from .config import HunyuanVideo15ImageConfig
from .model import HunyuanVideo15Model
from .plugin import IMAGE

__all__ = ["HunyuanVideo15ImageModel", "build"]


def build(
    config: HunyuanVideo15ImageConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> HunyuanVideo15ImageModel:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanVideo15ImageModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class HunyuanVideo15ImageModel(HunyuanVideo15Model):
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
            image = self._first_frame(name, text, media, sampling)
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

    def known(self, x: Tensor, conditions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The first frame is known."""
        behind = (0, 0, 0, 0, 0, x.shape[2] - 1)
        frame = conditions["first_frame"].to(x)
        return F.pad(frame, behind), F.pad(torch.ones_like(frame[:, :1]), behind)

    def image_embeds(self, x: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return conditions["image_embeds"]

    def _first_frame(
        self, name: str, text: str, media: Sequence[MediaRef], sampling: LatentSamplingConfig
    ) -> Image.Image:
        """The image of a prompt, scaled and cropped about its middle to the size of the video, as in the pipeline."""
        if len(media) != 1:
            raise DataError(
                f"prompt {name!r} ({text!r}): got {len(media)} source images; {self.spec.name} makes a video from its "
                "first frame. Give every prompt one, as media of role `source` and modality `image`."
            )
        image = load_picture(media[0])
        ratio = image.width * sampling.height / (image.height * sampling.width)
        if not 0.5 <= ratio <= 2:
            raise DataError(
                f"media {media[0].uri!r}: got {image.width} x {image.height} pixels for a video of {sampling.width} x "
                f"{sampling.height}, which would show less than half of it. Crop it, or change sampling.height and "
                "sampling.width."
            )
        return self.pipeline.video_processor.resize(
            image, height=sampling.height, width=sampling.width, resize_mode="crop"
        )
