"""Stable Diffusion 3 in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer is made of diffusers' blocks and takes its weights by their names. Its encoders are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "Sd3InSglang"]


class Sd3InSglang:
    pipeline = "sglang.multimodal_gen.runtime.pipelines.stable_diffusion_3:StableDiffusion3Pipeline"
    pipeline_config = "sglang.multimodal_gen.configs.pipeline_configs.stablediffusion3:StableDiffusion3PipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.stablediffusion3:StableDiffusion3SamplingParams"
    architecture = "StableDiffusion3Pipeline"
    modules: tuple[str, ...] = ("transformer",)
    fused: Mapping[str, tuple[str, ...]] = {}
    # A table of sines.
    renamed: Mapping[str, str] = {}
    constants = ("pos_embed.pos_embed",)
    num_encoders = 3
    rounds_timesteps = False

    def unfit(self, model: Any) -> str:
        if model.pipeline.text_encoder_3 is None:
            return (
                "SGLang encodes prompts of Stable Diffusion 3 with T5, but the model was loaded without it. Use a "
                "checkpoint that has it and model.use_t5=true, or engine=trainside."
            )
        return ""

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        # SGLang would give CLIP what T5 is given, or 77 whatever its tokenizer says.
        return tokenizers[0].model_max_length, tokenizers[1].model_max_length, sampling.max_sequence_length

    def latent_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return shape

    def packed(self, latents: Tensor) -> Tensor:
        return latents

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        return packed

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        return {"prompt_embeds": arguments["encoder_hidden_states"], "pooled": arguments["pooled_projections"]}


BRIDGE = Sd3InSglang()
