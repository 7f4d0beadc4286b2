"""Qwen-Image in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names, and drops the encoder's vision tower. Its
transformer wants the length of the text, which diffusers' reads off the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["BRIDGE", "QwenImageInVllmOmni"]

_PATCH = 2
"""Side of the patches that are packed into tokens."""


class QwenImageInVllmOmni:
    pipeline = "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image:QwenImagePipeline"
    architecture = "QwenImagePipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "to_out": ("to_out.0",),
    }

    def unfit(self, model: Any) -> str:
        return ""

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        unit = pipeline.vae_scale_factor * _PATCH
        return pipeline.transformer.in_channels, sampling.height // unit, sampling.width // unit

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        # It raises for a prompt that is longer than asked for. The encoder is causal: what is cut off behind it does
        # not change what stays.
        embeds, mask = pipeline.encode_prompt(prompt=[prompt], max_sequence_length=pipeline.tokenizer_max_length)
        missing = sampling.max_sequence_length - embeds.shape[1]
        return {"prompt_embeds": F.pad(embeds, (0, 0, 0, missing)), "prompt_mask": F.pad(mask.bool(), (0, missing))}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        return self.transformed(pipeline, x, sigma, conditions["prompt_embeds"], conditions["prompt_mask"])

    def transformed(
        self,
        pipeline: Any,
        x: Tensor,
        sigma: Tensor,
        embeds: Tensor,
        mask: Tensor,
        *,
        source: Tensor | None = None,
        shapes: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """The velocity by one forward. Arguments as of `QwenImageModel.transformed`."""
        dtype = pipeline.od_config.dtype
        rows, _, height, width = x.shape
        lengths: list[int] = mask.sum(dim=1).tolist()
        longest = max(lengths)
        given = x.to(dtype).flatten(2).transpose(1, 2)
        output = pipeline.transformer(
            hidden_states=given if source is None else torch.cat([given, source.to(dtype)], dim=1),
            # Rounded twice in 16 bits, as the model does.
            timestep=(sigma.float() * 1000.0).to(dtype) / 1000.0,
            encoder_hidden_states=embeds[:, :longest].to(dtype),
            encoder_hidden_states_mask=None if min(lengths) == longest else mask[:, :longest],
            img_shapes=[[(1, height, width), *map(tuple, shapes)]] * rows,
            txt_seq_lens=[longest] * rows,
        )
        return output.sample[:, : height * width].float().transpose(1, 2).reshape(x.shape).contiguous()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        settings = pipeline.vae.config
        mean, std = (
            torch.tensor(numbers, dtype=torch.float32, device=latents.device).view(1, settings.z_dim, 1, 1)
            for numbers in (settings.latents_mean, settings.latents_std)
        )
        # The VAE is one of videos: a frame goes in, a frame comes out.
        frames = (F.pixel_shuffle(latents.float(), _PATCH) * std + mean)[:, :, None]
        decoded = pipeline.vae.decode(frames.to(pipeline.vae.dtype), return_dict=False)[0][:, :, 0]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


BRIDGE = QwenImageInVllmOmni()
