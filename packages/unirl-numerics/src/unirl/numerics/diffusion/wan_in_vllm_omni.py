"""The Wan models in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names; its transformers take the same arguments,
fuse the projections of self-attention and name some layers otherwise. Its encoder and VAE compute in the engine's
dtype. Its own solver, shift and boundary take no part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .wan_prompts import cleaned

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["ONE_EXPERT", "TWO_EXPERTS", "WanInVllmOmni"]


@dataclass(frozen=True)
class WanInVllmOmni:
    module: str | tuple[str, ...]
    pipeline = "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2:Wan22Pipeline"
    architecture = "WanPipeline"
    fused = {  # noqa: RUF012 - a constant, and no field
        "to_qkv": ("to_q", "to_k", "to_v"),
        "to_out": ("to_out.0",),
        "ffn.net_0.proj": ("ffn.net.0.proj",),
        "ffn.net_2": ("ffn.net.2",),
        # It holds a table that is the transformer's own in training.
        "output_scale_shift_prepare": ("",),
    }

    def unfit(self, model: Any) -> str:
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        factor, rate = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        frames = 1 + (sampling.frames - 1) // rate
        return pipeline.transformer.config.out_channels, frames, sampling.height // factor, sampling.width // factor

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            cleaned(prompt, engine="vLLM-Omni"),
            do_classifier_free_guidance=False,
            max_sequence_length=sampling.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        dtype = pipeline.od_config.dtype
        # In fp32, also beside a transformer in bf16: rounded it would be off by up to 2.
        timestep = sigma.float() * 1000.0
        result = torch.empty_like(x)
        for expert, rows in self._experts(pipeline, timestep):
            if rows.any():
                own = {name: values[rows] for name, values in conditions.items()}
                arguments = {name: value.to(dtype) for name, value in self.arguments(x[rows], own).items()}
                result[rows] = expert(timestep=timestep[rows], return_dict=False, **arguments)[0].float()
        return result

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keyword arguments of one expert for its rows, except the timestep."""
        return {"hidden_states": x, "encoder_hidden_states": conditions["prompt_embeds"]}

    def _experts(self, pipeline: Any, timestep: Tensor) -> list[tuple[Any, Tensor]]:
        """Each transformer, and which rows [B] are its own. Rows of one batch may be at other steps."""
        if isinstance(self.module, str):
            return [(pipeline.transformer, torch.ones_like(timestep, dtype=torch.bool))]
        if not hasattr(pipeline, "unirl_boundary"):
            index = Path(pipeline.od_config.model) / "model_index.json"
            pipeline.unirl_boundary = json.loads(index.read_text(encoding="utf-8"))["boundary_ratio"]
        is_high = timestep >= 1000.0 * pipeline.unirl_boundary
        return [(pipeline.transformer, is_high), (pipeline.transformer_2, ~is_high)]

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        settings = pipeline.vae.config
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (settings.latents_mean, settings.latents_std)
        )
        scaled: Tensor = latents.float() * std + mean
        # One at a time, which bounds the memory.
        chunks: tuple[Tensor, ...] = torch.split(scaled.to(pipeline.vae.dtype), 1)
        videos = [pipeline.vae.decode(chunk, return_dict=False)[0] for chunk in chunks]
        media = (torch.cat(videos).float() / 2 + 0.5).clamp(0, 1)
        return media[:, :, 0] if media.shape[2] == 1 else media.transpose(1, 2)


ONE_EXPERT = WanInVllmOmni("transformer")
TWO_EXPERTS = WanInVllmOmni(("transformer", "transformer_2"))
