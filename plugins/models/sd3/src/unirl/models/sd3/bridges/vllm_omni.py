"""Stable Diffusion 3 in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names; its transformer takes the same arguments and
fuses the projections of attention. Its encoders and VAE compute in the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "Sd3InVllmOmni"]


class Sd3InVllmOmni:
    pipeline = "vllm_omni.diffusion.models.sd3.pipeline_sd3:StableDiffusion3Pipeline"
    architecture = "StableDiffusion3Pipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    }

    def unfit(self, model: Any) -> str:
        if model.pipeline.text_encoder_3 is None:
            return (
                "vLLM-Omni encodes prompts of Stable Diffusion 3 with T5, but the model was loaded without it. Use a "
                "checkpoint that has it and model.use_t5=true, or engine=trainside."
            )
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        factor = pipeline.vae_scale_factor
        return pipeline.transformer.in_channels, sampling.height // factor, sampling.width // factor

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        embeds, pooled = pipeline.encode_prompt(
            prompt=[prompt],
            # Empty stands for "as prompt".
            prompt_2="",
            prompt_3="",
            max_sequence_length=sampling.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        dtype = pipeline.od_config.dtype
        output = pipeline.transformer(
            hidden_states=x.to(dtype),
            # In fp32, also beside a transformer in bf16: rounded it would be off by up to 2.
            timestep=sigma.float() * 1000.0,
            encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
            pooled_projections=conditions["pooled"].to(dtype),
        )
        return output.sample.float()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        settings = pipeline.vae.config
        latents = latents.float() / settings.scaling_factor + (settings.shift_factor or 0.0)
        decoded = pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


BRIDGE = Sd3InVllmOmni()
