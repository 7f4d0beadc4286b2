"""FLUX.2 [klein] in vLLM-Omni: what `unirl.engines.vllm_omni.bridge.Bridge` asks of a model.

vLLM-Omni's pipeline has the components of diffusers' under the same names; its transformer takes the same arguments and
fuses the projections of attention in blocks of two streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from unirl.models.flux2_klein.sources import Sources

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["BRIDGE", "Flux2KleinInVllmOmni"]

_PATCH = 2
"""Side of the patches that are packed into tokens."""


class Flux2KleinInVllmOmni(Sources):
    pipeline = "vllm_omni.diffusion.models.flux2_klein.pipeline_flux2_klein:Flux2KleinPipeline"
    architecture = "Flux2KleinPipeline"
    module = "transformer"
    fused: Mapping[str, tuple[str, ...]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    }

    def unfit(self, model: Any) -> str:
        return ""

    def settings(self, model: Any) -> dict[str, Any]:
        return {}

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        unit = pipeline.vae_scale_factor * _PATCH
        return pipeline.transformer.config.in_channels, sampling.height // unit, sampling.width // unit

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(prompt=[prompt], max_sequence_length=sampling.max_sequence_length)
        return {"prompt_embeds": embeds}

    def encode_with_media(
        self, pipeline: Any, prompt: str, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> dict[str, Ragged]:
        pixels = self.pixels(media, pipeline.image_processor, unit=pipeline.vae_scale_factor * _PATCH)
        device, dtype = pipeline.vae.device, pipeline.vae.dtype
        with torch.no_grad():
            tokens, ids = pipeline.prepare_image_latents(
                images=pixels, batch_size=1, generator=None, device=device, dtype=dtype
            )
        return {**self.encode(pipeline, prompt, sampling), "source": (tokens[0],), "source_ids": (ids[0],)}

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Rows whose sources have equal positions go through the transformer together."""
        from unirl.model_host.diffusion.equal_forwards import in_groups

        keys = [ids.cpu().numpy().tobytes() for ids in conditions.get("source_ids", [torch.empty(0)] * len(x))]
        return in_groups(keys, lambda rows: self._velocity(pipeline, x[rows], sigma[rows], conditions, rows))

    def _velocity(
        self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any], rows: list[int]
    ) -> Tensor:
        dtype = pipeline.od_config.dtype
        embeds = conditions["prompt_embeds"][rows].to(dtype)
        tokens, ids = x.flatten(2).transpose(1, 2).to(dtype), pipeline._prepare_latent_ids(x[:1])[0].to(x.device)
        if "source" in conditions:
            tokens = torch.cat([tokens, torch.stack([conditions["source"][row] for row in rows]).to(tokens)], dim=1)
            ids = torch.cat([ids, conditions["source_ids"][rows[0]].to(x.device)])
        output = pipeline.transformer(
            hidden_states=tokens,
            # Rounded twice in 16 bits, as the model does.
            timestep=(sigma.float() * 1000.0).to(dtype) / 1000.0,
            encoder_hidden_states=embeds,
            txt_ids=pipeline._prepare_text_ids(embeds[:1])[0].to(x.device),
            img_ids=ids,
        )
        return output.sample[:, : x[0, 0].numel()].float().transpose(1, 2).reshape(x.shape).contiguous()

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        norm, settings = pipeline.vae.bn, pipeline.vae.config
        std = (norm.running_var + settings.batch_norm_eps).sqrt()
        mean, std = (statistic.view(1, -1, 1, 1).to(latents) for statistic in (norm.running_mean, std))
        latents = F.pixel_shuffle(latents * std + mean, _PATCH)
        decoded = pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


BRIDGE = Flux2KleinInVllmOmni()
