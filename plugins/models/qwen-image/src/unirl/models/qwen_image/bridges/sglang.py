"""Qwen-Image in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer, encoder and VAE are its own. The transformer has diffusers' names of weights, but for three
projections of the text that are one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.config import LatentSamplingConfig

__all__ = ["BRIDGE", "QwenImageInSglang"]

PREFIX = 34
"""Tokens of the template before the prompt, which are dropped once the encoder has read them."""
LONGEST = 1024


class QwenImageInSglang:
    pipeline = "sglang.multimodal_gen.runtime.pipelines.qwen_image:QwenImagePipeline"
    pipeline_config = "sglang.multimodal_gen.configs.pipeline_configs.qwen_image:QwenImagePipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.qwenimage:QwenImageSamplingParams"
    architecture = "QwenImagePipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {"to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
    constants = ()
    num_encoders = 1
    rounds_timesteps = True

    def unfit(self, model: Any) -> str:
        return ""

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        if not 1 <= sampling.max_sequence_length <= LONGEST:
            raise ValueError(
                f"sampling.max_sequence_length: {sampling.max_sequence_length} was asked for; qwen-image takes 1 to "
                f"{LONGEST}."
            )
        return (PREFIX + sampling.max_sequence_length,)

    def latent_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        _, channels, height, width = shape
        return 4 * channels, height // 2, width // 2

    def packed(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        return packed.transpose(1, 2).reshape(-1, *shape).contiguous()

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        # SGLang masks nothing: rows of one prompt have one length.
        (states,) = arguments["encoder_hidden_states"]
        rows, found, width = states.shape
        embeds = states.new_zeros(rows, sampling.max_sequence_length, width)
        embeds[:, :found] = states
        mask = states.new_zeros(embeds.shape[:2], dtype=bool)
        mask[:, :found] = True
        return {"prompt_embeds": embeds, "prompt_mask": mask}


BRIDGE = QwenImageInSglang()
