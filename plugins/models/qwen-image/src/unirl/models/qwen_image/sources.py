"""Encoder inputs of source images for the editing models, as in diffusers' pipelines. Also imported by bridges in
the environments of engines, whose pipelines have components of the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from unirl.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from unirl.core.types.data import MediaRef

__all__ = ["PICTURE", "EditSources", "held_processor", "images_and_text"]

PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
"""Text before the prompt for each of several images."""
_LONGEST_RATIO = 200
"""Largest ratio of an image's sides that the processor of Qwen2.5-VL takes."""


def images_and_text(folder: str) -> Any:
    """transformers' processor of Qwen2.5-VL in this folder, without its part for videos, which needs torchvision, and
    with images scaled by Pillow."""
    from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

    class ImagesAndText(Qwen2VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    return ImagesAndText(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
    )


held_processor = cache(images_and_text)
"""The same, read once: for engines, whose checkpoint stays as it is."""


class EditSources:
    """A base of the models and of the bridges. `pipeline` is diffusers', or one with the same components."""

    picture = ""
    """Text before the prompt for each image; the template of Qwen-Image-Edit has the image already."""
    takes_several = False
    edits = "qwen-image-edit"
    """Name of the model."""

    def edit_conditions(
        self,
        pipeline: Any,
        text: str,
        media: Sequence[MediaRef],
        *,
        name: str,
        length: int,
        source_area: int,
        condition_area: int,
        token_types: bool,
    ) -> Mapping[str, Tensor]:
        """Conditions of a prompt: `prompt_embeds` [L, D], `source` [S, 4 C], `source_shapes` [k, 3] of k images.

        name: of the prompt, for errors.  length: most tokens behind the last image.  The rest is of the model's config.
        Raises DataError for a prompt without a source image, or with more than the model takes, and for an image that
        cannot be read or scaled.
        """
        from unirl.numerics.media import load_picture

        self._check_media(pipeline, name, text, media)
        images = [(ref, load_picture(ref)) for ref in media]
        seen = [self._scaled(pipeline, *one, condition_area) for one in images]
        latents = [self._latents(pipeline, self._scaled(pipeline, *one, source_area)) for one in images]
        source = torch.cat([tokens for tokens, _ in latents])
        return {
            "prompt_embeds": self._embeds(pipeline, text, seen, length=length, token_types=token_types),
            "source": source,
            "source_shapes": torch.tensor([shape for _, shape in latents], device=source.device),
        }

    def _check_media(self, pipeline: Any, name: str, text: str, media: Sequence[MediaRef]) -> None:
        place = pipeline.processor.image_token
        if not media:
            raise DataError(
                f"prompt {name!r} ({text!r}): got no source image; {self.edits} edits images. Give every prompt "
                "one, as media of role `source` and modality `image`."
            )
        if len(media) > 1 and not self.takes_several:
            raise DataError(
                f"prompt {name!r} ({text!r}): got {len(media)} source images, expected one; model=qwen-image-edit-plus "
                "takes several."
            )
        if place in text:
            raise DataError(
                f"prompt {name!r}: got {place!r} in the text {text!r}, which stands for an image. Remove it."
            )

    def _embeds(self, pipeline: Any, text: str, images: list[Image], *, length: int, token_types: bool) -> Tensor:
        """[L, D] of the images and at most `length` tokens behind them, those that end the template included: states of
        the encoder, those of the template's beginning dropped."""
        pictures = "".join(self.picture.format(number + 1) for number in range(len(images)))
        tokens = pipeline.processor(
            text=[pipeline.prompt_template_encode.format(pictures + text)], images=images, return_tensors="pt"
        ).to(pipeline.text_encoder.device)
        (ends,) = (tokens.input_ids[0] == pipeline.tokenizer.convert_tokens_to_ids("<|vision_end|>")).nonzero(
            as_tuple=True
        )
        # The encoder is causal: what is cut off behind does not change what stays.
        length = int(ends[len(images) - 1]) + 1 + length
        types = {"mm_token_type_ids": tokens.mm_token_type_ids[:, :length]} if token_types else {}
        states = self._states(
            pipeline,
            input_ids=tokens.input_ids[:, :length],
            attention_mask=tokens.attention_mask[:, :length],
            pixel_values=tokens.pixel_values,
            image_grid_thw=tokens.image_grid_thw,
            **types,
        )
        return states[0, pipeline.prompt_template_encode_start_idx :]

    def _states(self, pipeline: Any, **tokens: Tensor) -> Tensor:
        """[1, L, D] of the text encoder, without the language model's head, whose logits are not used."""
        return pipeline.text_encoder.model(**tokens, use_cache=False).last_hidden_state

    def _latents(self, pipeline: Any, image: Image) -> tuple[Tensor, tuple[int, int, int]]:
        """Tokens [S, 4 C] of a source image, and its frames, rows and columns of them."""
        vae = pipeline.vae
        pixels = pipeline.image_processor.preprocess(image, image.height, image.width)[:, :, None]
        latents = pipeline._encode_vae_image(pixels.to(vae.device, vae.dtype), generator=None)
        *_, height, width = latents.shape
        tokens = pipeline._pack_latents(latents, 1, latents.shape[1], height, width)
        return tokens[0], (1, height // 2, width // 2)

    def _scaled(self, pipeline: Any, ref: MediaRef, image: Image, area: int) -> Image:
        """The image as the pipeline scales it to an area, in pixels."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

        width, height = calculate_dimensions(area, image.width / image.height)
        if not min(width, height) or max(width, height) > _LONGEST_RATIO * min(width, height):
            raise DataError(
                f"media {ref.uri!r}: got {image.width} x {image.height} pixels, which {self.edits} scales to "
                f"{width} x {height}; expected one side at most {_LONGEST_RATIO} times the other. Crop it."
            )
        return pipeline.image_processor.resize(image, height, width)
