"""What the Wan models have in common: prompts, latents, and the call of a transformer.

Source: Wan technical report, arXiv 2503.20314; verified against diffusers' `WanPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_model import PipelineModel, own_memory
from unirl.model_host.diffusion.sequence_parallel import TokenSplit

__all__ = ["WanModel"]


class WanModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel` on the components of a `WanPipeline`.

    Latents: [C, 1 + (F - 1) / 4, H / 8, W / 8].
    Conditions: `prompt_embeds` [n, L, D], zeros after the last token. They are not masked: the transformer attends to
    the zeros too, as it did in training, where L was 512.
    """

    vae_of_videos = True
    max_sequence_length = 512
    sequence = TokenSplit(blocks=("blocks",), attention="attn1", rotary="rotary_emb", rotary_dim=1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.experts:
            expert: Any = self.pipeline.components[name]
            self.token_side = expert.config.patch_size[-1]
            self.keep_timestep_fp32(cast(nn.Module, expert.condition_embedder))
            expert.register_forward_hook(own_memory)

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
        with self.computing():
            velocity = self.trainable(
                timestep=sigma.float() * 1000.0, **self.arguments(x, conditions), return_dict=False
            )[0]
        return velocity.float()

    def arguments(self, x: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the transformer besides the timestep, by name, in the dtype that it computes in."""
        dtype = self.compute_dtype
        return {"hidden_states": x.to(dtype), "encoder_hidden_states": conditions["prompt_embeds"].to(dtype)}

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int, int]:
        """[C, F, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        factor, rate = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        settings = cast(Any, self.transformer).config
        unit, places, depth = factor * self.token_side, settings.rope_max_seq_len, settings.patch_size[0]
        self.check_video(
            sampling,
            unit=unit,
            frame_step=depth * rate,
            least_frames=(depth - 1) * rate + 1,
            largest=places * unit,
            most_frames=(depth * places - 1) * rate + 1,
        )
        num_frames = 1 + (sampling.frames - 1) // rate
        return settings.out_channels, num_frames, sampling.height // factor, sampling.width // factor
