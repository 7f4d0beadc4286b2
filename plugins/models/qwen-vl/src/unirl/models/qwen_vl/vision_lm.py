"""The checkpoint's own models, whose forward places the images of prompts alone and can end in log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from unirl.numerics.tokens.token_scores import TokenScores

__all__ = ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]


class _PlacesImages:
    """A trunk that is told which tokens are images: a completion may hold the placeholder's token too, which
    transformers would count as one. Without `is_image` the forward is that of transformers."""

    visual: Any
    language_model: Any
    get_input_embeddings: Any
    get_image_features: Any

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        is_image: Tensor | None = None,
        images: Sequence[int] = (),
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """is_image: [B, L] bool.  pixel_values, image_grid_thw: of distinct images.  images: which of them each place
        in the batch shows, in order."""
        if is_image is None:
            given = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
            return super().forward(input_ids, **given, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        embeddings: Tensor = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values, image_grid_thw, return_dict=True)
            shown = torch.cat([features.pooler_output[image] for image in images])
            embeddings = embeddings.masked_scatter(is_image[..., None], shown.to(embeddings.dtype))
            if "deepstack_features" in features:
                kwargs["visual_pos_masks"] = is_image
                kwargs["deepstack_visual_embeds"] = [
                    torch.cat([layer[image] for image in images]) for layer in features.deepstack_features
                ]
        return self.language_model(inputs_embeds=embeddings, **kwargs)


class _OfTransformers:
    """A class of transformers with a changed forward. It reads and writes the checkpoints of the class that it is named
    after, in which weights may be named otherwise than in the module."""

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


class Qwen2_5_VLModel(_PlacesImages, _OfTransformers, modeling_qwen2_5_vl.Qwen2_5_VLModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class Qwen3VLModel(_PlacesImages, _OfTransformers, modeling_qwen3_vl.Qwen3VLModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class Qwen2_5_VLForConditionalGeneration(
    TokenScores, _OfTransformers, modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen2_5_VLModel(config)
        self.post_init()


class Qwen3VLForConditionalGeneration(TokenScores, _OfTransformers, modeling_qwen3_vl.Qwen3VLForConditionalGeneration):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3VLModel(config)
        self.post_init()
