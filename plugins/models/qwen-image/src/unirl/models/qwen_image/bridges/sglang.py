"""Qwen-Image in SGLang: what `unirl.engines.sglang.bridge.Bridge` asks of a model.

SGLang's transformer, encoder and VAE are its own. The transformer has diffusers' names of weights, except for three
projections of the text that are one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "QwenImageInSglang"]

PREFIX = 34
"""Tokens of the template before the prompt, which are dropped once the encoder has read them."""
LONGEST = 1024
"""Maximum number of prompt tokens."""


class QwenImageInSglang:
    pipeline = "sglang.multimodal_gen.runtime.pipelines.qwen_image:QwenImagePipeline"
    pipeline_config = "sglang.multimodal_gen.configs.pipeline_configs.qwen_image:QwenImagePipelineConfig"
    sampling_params = "sglang.multimodal_gen.configs.sample.qwenimage:QwenImageSamplingParams"
    architecture = "QwenImagePipeline"
    modules: tuple[str, ...] = ("transformer",)
    fused: Mapping[str, tuple[str, ...]] = {"to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
    renamed: Mapping[str, str] = {}
    constants = ()
    num_encoders = 1
    rounds_timesteps = True

    def unfit(self, model: Any) -> str:
        return ""

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> tuple[int, ...]:
        if not 1 <= sampling.max_sequence_length <= LONGEST:
            raise ValueError(
                f"sampling.max_sequence_length: got {sampling.max_sequence_length}; qwen-image takes 1 to {LONGEST}."
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
        # Rows of one prompt have one length, and SGLang masks nothing.
        (states,) = arguments["encoder_hidden_states"]
        missing = sampling.max_sequence_length - states.shape[1]
        mask = torch.ones(states.shape[:2], dtype=torch.bool)
        return {"prompt_embeds": F.pad(states, (0, 0, 0, missing)), "prompt_mask": F.pad(mask, (0, missing))}


BRIDGE = QwenImageInSglang()
