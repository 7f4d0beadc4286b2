# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
"""HunyuanVideo 1.5 in vLLM-Omni, text to video: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names, and its transformer takes the same
arguments; it does not say which layers it fuses, without which adapters are refused. Its text encoders compute in the
engine's dtype. Its own scheduler takes no part.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "HunyuanVideo15InVllmOmni", "adaptable"]


class HunyuanVideo15InVllmOmni:
    pipeline = f"{__name__}:Pipeline"
    architecture = "HunyuanVideo15Pipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    }

    def unfit(self, model: Any) -> str:
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        factor, rate = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        frames = 1 + (sampling.frames - 1) // rate
        return pipeline.num_channels_latents, frames, sampling.height // factor, sampling.width // factor

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        pipeline.tokenizer_max_length = sampling.max_sequence_length
        embeds, mask, glyphs, glyph_mask, *_ = pipeline.encode_prompt(
            prompt, device=pipeline.device, dtype=pipeline.od_config.dtype
        )
        return {
            "prompt_embeds": embeds,
            "prompt_mask": mask.bool(),
            "glyph_embeds": glyphs,
            "glyph_mask": glyph_mask.bool(),
        }

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        dtype, transformer = pipeline.od_config.dtype, pipeline.transformer
        lengths = {name: int(conditions[f"{name}_mask"].sum(dim=1).max()) for name in ("prompt", "glyph")}
        embeds, glyphs = (conditions[f"{name}_embeds"][:, :length].to(dtype) for name, length in lengths.items())
        mask, glyph_mask = (conditions[f"{name}_mask"][:, :length].to(dtype) for name, length in lengths.items())
        image = conditions.get("image_embeds")
        if image is None:
            image = x.new_zeros((len(x), 0, transformer.image_embedder.linear_1.in_features))
        output = transformer(
            hidden_states=torch.cat([x, *self.known(x, conditions)], dim=1).to(dtype),
            timestep=(sigma.float() * 1000.0).to(dtype),
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=image.to(dtype),
            return_dict=False,
        )[0]
        return output.float()

    def known(self, x: Tensor, conditions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Latents of known frames, as x, and a mask of those [B, 1, ...]: zeros, as none is known."""
        return torch.zeros_like(x), torch.zeros_like(x[:, :1])

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        scaled = (latents.float() / pipeline.vae.config.scaling_factor).to(pipeline.vae.dtype)
        # One at a time: the VAE fails on two.
        chunks: tuple[Tensor, ...] = torch.split(scaled, 1)
        videos = [pipeline.vae.decode(chunk, return_dict=False)[0] for chunk in chunks]
        media = (torch.cat(videos).float() / 2 + 0.5).clamp(0, 1)
        return media[:, :, 0] if media.shape[2] == 1 else media.transpose(1, 2)


BRIDGE = HunyuanVideo15InVllmOmni()


def __getattr__(name: str) -> Any:
    """`Pipeline`, made in vLLM-Omni's environment."""
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline()


@functools.cache
def _pipeline() -> type:
    from vllm_omni.diffusion.models.hunyuan_video.pipeline_hunyuan_video_1_5 import HunyuanVideo15Pipeline

    return adaptable(HunyuanVideo15Pipeline)


def adaptable(stock: Any) -> Any:
    """One of vLLM-Omni's pipelines, with a transformer that says which layers it fuses."""

    class Pipeline(stock):
        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            super().__init__(od_config=od_config, prefix=prefix)
            self.transformer.stacked_params_mapping = [
                (f".{fused}", f".{part}", part.removeprefix("to_").removeprefix("add_")[0])
                for fused, parts in BRIDGE.fused.items()
                for part in parts
            ]

    return Pipeline
