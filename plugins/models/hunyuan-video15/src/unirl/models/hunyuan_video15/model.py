# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
"""HunyuanVideo 1.5, text to video, as a diffusion stage on the components of diffusers' own pipeline.

Source: HunyuanVideo 1.5 technical report, arXiv 2511.18870; verified against diffusers' `HunyuanVideo15Pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles
from unirl.model_host.diffusion.pipeline_model import PipelineModel, own_memory
from unirl.model_host.diffusion.sequence_parallel import TokenSplit

from .checkpoint import FILES
from .config import HunyuanVideo15Config
from .plugin import SPEC

__all__ = ["HunyuanVideo15Model", "build"]


def build(
    config: HunyuanVideo15Config, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> HunyuanVideo15Model:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanVideo15Model(config, device=torch.device(device), lazy=lazy, serves=serves)


class HunyuanVideo15Model(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [C, 1 + (F - 1) / 4, H / 16, W / 16].
    Conditions: `prompt_embeds` [n, L, D], states of Qwen2.5-VL's text model before its last two layers, of the tokens
    of the prompt and those behind it in the chat template; `glyph_embeds` [n, 256, E], ByT5's of the quoted words of
    the prompt, zeros without any; `prompt_mask` and `glyph_mask`, of the same rows and tokens, bool, true up to the
    last token.
    """

    spec = SPEC
    files: ClassVar[PipelineFiles] = FILES
    vae_of_videos = True
    sequence = TokenSplit(
        blocks=("transformer_blocks",),
        attention="attn",
        rotary="image_rotary_emb",
        rotary_dim=0,
        joins_texts=True,
    )

    def __init__(
        self,
        config: HunyuanVideo15Config,
        *,
        device: torch.device,
        lazy: bool,
        serves: frozenset[ModelPart] = MODEL_PARTS,
    ) -> None:
        super().__init__(
            config,
            find=self.files.find,
            load=self.files.load,
            transformer=HunyuanVideo15Transformer3DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self.max_sequence_length = self.pipeline.tokenizer_max_length
        self.token_side = cast(Any, self.transformer).config.patch_size
        self.transformer.register_forward_hook(own_memory)
        # The module casts them to the dtype of the timestep, which mixed precision leaves in fp32.
        cast(Any, self.transformer).time_embed.timestep_embedder.register_forward_pre_hook(_cast_to_weights)
        # Its attention fails on two videos at once.
        self.vae.use_slicing = True

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        pipeline = self.pipeline
        embeds, mask = pipeline._get_mllm_prompt_embeds(
            text_encoder=pipeline.text_encoder,
            tokenizer=pipeline.tokenizer,
            prompt=list(texts),
            device=self.device,
            tokenizer_max_length=sampling.max_sequence_length,
            system_message=pipeline.system_message,
            crop_start=pipeline.prompt_template_encode_start_idx,
        )
        glyphs, glyph_mask = pipeline._get_byt5_prompt_embeds(
            tokenizer=pipeline.tokenizer_2,
            text_encoder=pipeline.text_encoder_2,
            prompt=list(texts),
            device=self.device,
            tokenizer_max_length=pipeline.tokenizer_2_max_length,
        )
        return {
            "prompt_embeds": embeds,
            "prompt_mask": mask.bool(),
            "glyph_embeds": glyphs,
            "glyph_mask": glyph_mask.bool(),
        }

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is rounded to the transformer's dtype, as in the pipeline.

        Texts are cut to the longest of the batch: what the pipeline has behind them is masked.
        """
        dtype = self.compute_dtype
        lengths = {name: int(conditions[f"{name}_mask"].sum(dim=1).max()) for name in ("prompt", "glyph")}
        embeds, glyphs = (conditions[f"{name}_embeds"][:, :length].to(dtype) for name, length in lengths.items())
        mask, glyph_mask = (conditions[f"{name}_mask"][:, :length].to(dtype) for name, length in lengths.items())
        with self.computing():
            velocity: Tensor = self.transformer(
                hidden_states=torch.cat([x, *self.known(x, conditions)], dim=1).to(dtype),
                timestep=(sigma.float() * 1000.0).to(dtype),
                encoder_hidden_states=embeds,
                encoder_attention_mask=mask,
                encoder_hidden_states_2=glyphs,
                encoder_attention_mask_2=glyph_mask,
                image_embeds=self.image_embeds(x, conditions).to(dtype),
                return_dict=False,
            )[0]
        return velocity.float()

    def known(self, x: Tensor, conditions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Latents of known frames, as x, and a mask of those [B, 1, ...]: zeros, as none is known."""
        return torch.zeros_like(x), torch.zeros_like(x[:, :1])

    def image_embeds(self, x: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of an image [B, S, E]. In place of the pipeline's 729 zeros, all masked, there are none."""
        return x.new_zeros((len(x), 0, self.pipeline.vision_states_dim))

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, F, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other, and for
        guidance on a distilled checkpoint."""
        pipeline, guider = self.pipeline, self.pipeline.guider
        if sampling.is_guided and guider.num_conditions == 1:
            raise RecipeError(
                f"sampling.guidance_scale: got {sampling.guidance_scale:g} for a checkpoint whose guidance is "
                "distilled into its weights; expected 1. Use one that is not distilled."
            )
        return pipeline.num_channels_latents, *self.checked_latent(sampling)


def _cast_to_weights(embedder: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A pre-forward hook of diffusers' `TimestepEmbedding`."""
    return tuple(value.to(embedder.linear_1.weight.dtype) for value in args)
