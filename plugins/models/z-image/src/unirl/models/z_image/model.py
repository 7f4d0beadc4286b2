# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Z-Image as a diffusion stage, on the components of diffusers' own pipeline.

Source: Z-Image, arXiv 2511.22699; verified against diffusers' `ZImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_files import chat_texts, chat_tokens, num_longer
from unirl.model_host.diffusion.pipeline_model import PipelineModel

from .checkpoint import FILES
from .config import PATCH, ZImageConfig
from .plugin import SPEC

__all__ = ["ZImageModel", "build"]

_PADDED_TO = 32
"""The transformer pads a prompt to a multiple of this, and the positions of the image begin behind it."""


def build(
    config: ZImageConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> ZImageModel:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return ZImageModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class ZImageModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [C, H / 8, W / 8], in patches of two by two.
    Conditions: `prompt_embeds` [n, L, D], zeros after the last token; `prompt_mask` [n, L] bool, true up to there.
    """

    spec = SPEC
    token_side = PATCH

    def __init__(
        self, config: ZImageConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=FILES.find,
            load=FILES.load,
            transformer=ZImageTransformer2DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self._settings: Any = cast(Any, self.transformer).config
        # Positions: 0 is that of padding, those of the prompt begin at 1, and the image has the one behind them.
        self.max_sequence_length = (self._settings.axes_lens[0] - 2) // _PADDED_TO * _PADDED_TO

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Each prompt is a user's message in the tokenizer's chat template; its tokens count towards the length. The
        states are those before the encoder's last layer."""
        length = sampling.max_sequence_length
        ids, mask = chat_tokens(self.pipeline.tokenizer, texts, length=length, enable_thinking=True)
        ids, mask = ids.to(self.device), mask.to(self.device)
        states: Tensor = self.pipeline.text_encoder(
            input_ids=ids, attention_mask=mask, output_hidden_states=True
        ).hidden_states[-2]
        embeds, kept = torch.zeros_like(states), torch.zeros_like(mask)
        for row, is_token in enumerate(mask):
            num_tokens = int(is_token.sum())
            embeds[row, :num_tokens], kept[row, :num_tokens] = states[row, is_token], True
        return {"prompt_embeds": embeds, "prompt_mask": kept}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int:
        tokenizer = self.pipeline.tokenizer
        return num_longer(tokenizer, chat_texts(tokenizer, texts, enable_thinking=True), sampling.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The transformer gives x0 - x1, by a time that rises from 0 to 1."""
        dtype = self.compute_dtype
        lengths: list[int] = conditions["prompt_mask"].sum(dim=1).tolist()
        with self.computing():
            rows: list[Tensor] = self.transformer(
                list(x.to(dtype).unsqueeze(2).unbind(0)),
                # The pipeline's arithmetic, in fp32.
                (1000.0 - sigma.float() * 1000.0) / 1000.0,
                [embeds[:n].to(dtype) for embeds, n in zip(conditions["prompt_embeds"], lengths, strict=True)],
                return_dict=False,
            )[0]
        return -torch.stack(rows).float().squeeze(2)

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H / 8, W / 8] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        return self._settings.in_channels, *self.checked_latent(sampling)
