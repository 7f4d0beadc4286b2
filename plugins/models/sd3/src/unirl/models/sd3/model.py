# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Stable Diffusion 3 and 3.5 as a diffusion stage, on the components of diffusers' own pipeline.

Source: Stable Diffusion 3, arXiv 2403.03206; verified against diffusers' `StableDiffusion3Pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_files import num_longer
from unirl.model_host.diffusion.pipeline_model import PipelineModel

from .checkpoint import find, load_pipeline
from .config import Sd3Config, Sd3Options
from .plugin import SPEC

__all__ = ["Sd3Model", "build"]


def build(
    config: Sd3Config, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Sd3Model:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Sd3Model(config, device=torch.device(device), lazy=lazy, serves=serves)


class Sd3Model(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`. Latents: [C, H / 8, W / 8].

    Conditions: `prompt_embeds` [n, L, D], CLIP and T5 tokens after each other; `pooled` [n, P], both CLIPs.
    """

    spec = SPEC
    max_sequence_length = 512
    """Most T5 tokens that diffusers' pipeline allows."""

    def __init__(
        self, config: Sd3Config, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=find,
            load=load_pipeline,
            transformer=SD3Transformer2DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self.token_side = self.pipeline.patch_size
        encoders = (self.pipeline.text_encoder, self.pipeline.text_encoder_2)
        self._clip_layers: list[int] = [encoder.config.num_hidden_layers for encoder in encoders]
        self.keep_timestep_fp32(cast(torch.nn.Module, self.transformer.time_text_embed))

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        skipped = Sd3Options(**sampling.options).clip_skip
        most = min(self._clip_layers) - 1
        if skipped > most:
            raise RecipeError(f"sampling.options.clip_skip: got {skipped}; this checkpoint takes 0 to {most}.")
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=sampling.max_sequence_length,
            clip_skip=skipped,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int:
        """T5 reads the most; without it CLIP does."""
        pipeline = self.pipeline
        if pipeline.tokenizer_3 is None:
            return num_longer(pipeline.tokenizer, texts, pipeline.tokenizer_max_length)
        return num_longer(pipeline.tokenizer_3, texts, sampling.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is formed in fp32 and stays so: in bf16 it would be off by up to 2."""
        dtype = self.compute_dtype
        with self.computing():
            velocity = self.transformer(
                hidden_states=x.to(dtype),
                timestep=sigma.float() * 1000.0,
                encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
                pooled_projections=conditions["pooled"].to(dtype),
                return_dict=False,
            )[0]
        return velocity.float()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        return cast(Any, self.transformer.config).in_channels, *self.checked_latent(sampling)
