# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Wan 2.1 as a diffusion stage, on the components of diffusers' own pipeline.

Source: Wan technical report, arXiv 2503.20314; verified against diffusers' `WanPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.diffusion.pipeline_model import PipelineModel

from .checkpoint import FILES
from .config import Wan21Config
from .plugin import SPEC

__all__ = ["Wan21Model", "build"]


def build(
    config: Wan21Config, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Wan21Model:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Wan21Model(config, device=torch.device(device), lazy=lazy, serves=serves)


class Wan21Model(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`. Latents: [C, 1 + (F - 1) / 4, H / 8, W / 8].

    Conditions: `prompt_embeds` [n, L, D], zeros after the last token. They are not masked: the transformer attends to
    the zeros too, as it did in training, where L was 512.
    """

    spec = SPEC
    vae_of_videos = True
    max_sequence_length = 512

    def __init__(
        self, config: Wan21Config, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=FILES.find,
            load=FILES.load,
            transformer=WanTransformer3DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self.token_side = cast(Any, self.transformer.config).patch_size[-1]
        self.keep_timestep_fp32(cast(torch.nn.Module, self.transformer.condition_embedder))
        self.transformer.register_forward_hook(_own_memory)

    @property
    def sequence_plan(self) -> Mapping[str, Any]:
        # Without the root's: timesteps of each token are Wan 2.2's.
        return {name: part for name, part in super().sequence_plan.items() if name}

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=list(texts),
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=sampling.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is formed in fp32 and stays so: in bf16 it would be off by up to 2."""
        dtype = self.compute_dtype
        with self.computing():
            velocity = self.transformer(
                hidden_states=x.to(dtype),
                timestep=sigma.float() * 1000.0,
                encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
                return_dict=False,
            )[0]
        return velocity.float()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int, int]:
        """[C, F, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        factor, rate = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        settings = cast(Any, self.transformer.config)
        unit, places = factor * self.token_side, settings.rope_max_seq_len
        self.check_video(
            sampling, unit=unit, frame_step=rate, largest=places * unit, most_frames=(places - 1) * rate + 1
        )
        num_frames = 1 + (sampling.frames - 1) // rate
        return settings.in_channels, num_frames, sampling.height // factor, sampling.width // factor


def _own_memory(_module: torch.nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """FSDP2 warns of modules that return views, as Wan's transformer does."""
    return tuple(part.clone() for part in output)
