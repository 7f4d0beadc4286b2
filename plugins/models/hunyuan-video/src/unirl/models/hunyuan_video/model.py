# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""HunyuanVideo 1.0, text to video, as a diffusion stage on the components of diffusers' own pipeline.

Source: HunyuanVideo technical report, arXiv 2412.03603; verified against diffusers' `HunyuanVideoPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_model import PipelineModel, own_memory
from unirl.model_host.diffusion.sequence_parallel import TokenSplit

from .checkpoint import FILES
from .config import HunyuanVideoConfig, HunyuanVideoOptions
from .plugin import SPEC

__all__ = ["HunyuanVideoModel", "build"]


def build(
    config: HunyuanVideoConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> HunyuanVideoModel:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanVideoModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class HunyuanVideoModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [C, 1 + (F - 1) / 4, H / 8, W / 8].
    Conditions: `prompt_embeds` [n, L, D], states of Llama before its last two layers, of the tokens of the prompt and
    the one behind it in the pipeline's template; `prompt_mask` [n, L] bool, true up to the last token; `pooled` [n, P],
    CLIP's of the prompt; `guidance` [n] fp32, the scale that the transformer is told.
    """

    spec = SPEC
    vae_of_videos = True
    sequence = TokenSplit(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attention="attn",
        rotary="image_rotary_emb",
        rotary_dim=0,
        joins_texts=True,
    )
    max_sequence_length = 256

    def __init__(
        self,
        config: HunyuanVideoConfig,
        *,
        device: torch.device,
        lazy: bool,
        serves: frozenset[ModelPart] = MODEL_PARTS,
    ) -> None:
        super().__init__(
            config,
            find=FILES.find,
            load=FILES.load,
            transformer=HunyuanVideoTransformer3DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        transformer = cast(Any, self.transformer)
        self.token_side = transformer.config.patch_size
        self.keep_timestep_fp32(transformer.time_text_embed)
        for module in (self.transformer, *transformer.single_transformer_blocks):
            module.register_forward_hook(own_memory)

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        embeds, pooled, mask = self.pipeline.encode_prompt(
            prompt=list(texts), device=self.device, max_sequence_length=sampling.max_sequence_length
        )
        scale = HunyuanVideoOptions(**sampling.options).embedded_guidance
        guidance = torch.full((len(texts),), scale, device=self.device)
        return {"prompt_embeds": embeds, "prompt_mask": mask.bool(), "pooled": pooled, "guidance": guidance}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is formed in fp32 and stays so; the guidance scale is rounded to the
        transformer's dtype and then multiplied by 1000, both as in the pipeline.

        Texts are cut to the longest of the batch: what the pipeline has behind them is masked.
        """
        dtype = self.compute_dtype
        length = int(conditions["prompt_mask"].sum(dim=1).max())
        with self.computing():
            velocity: Tensor = self.transformer(
                hidden_states=x.to(dtype),
                timestep=sigma.float() * 1000.0,
                encoder_hidden_states=conditions["prompt_embeds"][:, :length].to(dtype),
                encoder_attention_mask=conditions["prompt_mask"][:, :length].to(dtype),
                pooled_projections=conditions["pooled"].to(dtype),
                guidance=conditions["guidance"].to(dtype) * 1000.0,
                return_dict=False,
            )[0]
        return velocity.float()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, F, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other, and for
        guidance by two forwards."""
        return cast(Any, self.transformer).config.in_channels, *self.checked_latent(sampling)
