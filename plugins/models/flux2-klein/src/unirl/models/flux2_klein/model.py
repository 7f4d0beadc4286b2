# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""FLUX.2 [klein] as a diffusion stage, on the components of diffusers' own pipeline: text to image, and editing.

Source: the FLUX.2 release of Black Forest Labs; verified against diffusers' `Flux2KleinPipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import Flux2Transformer2DModel
from torch import Tensor
from unirl.core.specs.spec import MODEL_PARTS, ModelPart
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.equal_forwards import in_groups
from unirl.model_host.diffusion.pipeline_files import chat_texts, chat_tokens, num_longer
from unirl.model_host.diffusion.pipeline_model import PipelineModel

from .checkpoint import FILES, TEXT_LAYERS
from .config import PATCH, Flux2KleinConfig
from .plugin import SPEC
from .sources import Sources

__all__ = ["Flux2KleinModel", "build"]


def build(
    config: Flux2KleinConfig, *, device: Any, lazy: bool = False, serves: frozenset[ModelPart] = MODEL_PARTS
) -> Flux2KleinModel:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Flux2KleinModel(config, device=torch.device(device), lazy=lazy, serves=serves)


class Flux2KleinModel(PipelineModel):
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [4 C, H / 16, W / 16], the C channels of the VAE at the four places of a patch, normalised by the VAE's
    batch statistics; a token of the transformer is one place of it.
    Conditions: `prompt_embeds` [n, L, 3 D] of all L tokens, padding included, as in the pipeline. Where an input has
    images also `source`, n times [S, 4 C], their latents as tokens, S = 0 without images; `source_ids`, n times [S, 4],
    their positions.
    """

    spec = SPEC
    mu_rule = "flux2"

    def __init__(
        self, config: Flux2KleinConfig, *, device: torch.device, lazy: bool, serves: frozenset[ModelPart] = MODEL_PARTS
    ) -> None:
        super().__init__(
            config,
            find=FILES.find,
            load=FILES.load,
            transformer=Flux2Transformer2DModel,
            device=device,
            lazy=lazy,
            serves=serves,
        )
        self.max_sequence_length = self.pipeline.tokenizer_max_length

    @torch.no_grad()
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of each input's text, and of its images if there are any in the batch.

        Raises DataError for an image that cannot be read, or that the pipeline does not take.
        """
        texts = super().encode(inputs, sampling=sampling)
        if not any(inputs.media):
            return texts
        tokens, ids = zip(*map(self._source, inputs.media), strict=True)
        return {**texts, "source": tokens, "source_ids": ids}

    def encode_texts(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Each prompt is a user's message in the tokenizer's chat template, whose tokens count towards the length. The
        states of three layers lie side by side."""
        ids, mask = chat_tokens(
            self.pipeline.tokenizer, texts, length=sampling.max_sequence_length, enable_thinking=False
        )
        # Without the language model's head, whose logits over the vocabulary are not used.
        states: Sequence[Tensor] = self.pipeline.text_encoder.model(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return {"prompt_embeds": torch.cat([states[layer] for layer in TEXT_LAYERS], dim=-1)}

    def num_cut(self, texts: Sequence[str], *, sampling: LatentSamplingConfig) -> int:
        tokenizer = self.pipeline.tokenizer
        return num_longer(tokenizer, chat_texts(tokenizer, texts, enable_thinking=False), sampling.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0. Rows whose sources have equal positions go through the transformer together."""
        if "source_ids" not in conditions:
            return self._velocity(x, sigma, conditions, range(len(x)))

        def forward(rows: Sequence[int]) -> Tensor:
            # To select rows the device waits for their numbers.
            own, levels = (x, sigma) if len(rows) == len(x) else (x[rows], sigma[rows])
            return self._velocity(own, levels, conditions, rows)

        keys = [ids.cpu().numpy().tobytes() for ids in conditions["source_ids"]]
        return in_groups(keys, forward, module=self.transformer)

    def _velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any], rows: Sequence[int]) -> Tensor:
        dtype, pipeline = self.compute_dtype, cast(Any, self.pipeline)
        embeds = conditions["prompt_embeds"][list(rows)].to(dtype)
        tokens, ids = x.flatten(2).transpose(1, 2).to(dtype), pipeline._prepare_latent_ids(x[:1])[0].to(x.device)
        if "source" in conditions:
            source = torch.stack([conditions["source"][row] for row in rows]).to(tokens)
            tokens = torch.cat([tokens, source], dim=1)
            ids = torch.cat([ids, conditions["source_ids"][rows[0]].to(x.device)])
        with self.computing():
            output: Tensor = self.transformer(
                hidden_states=tokens,
                # The pipeline's arithmetic: in 16 bits its timestep is rounded twice.
                timestep=(sigma.float() * 1000.0).to(dtype) / 1000.0,
                guidance=None,
                encoder_hidden_states=embeds,
                txt_ids=pipeline._prepare_text_ids(embeds[:1])[0].to(x.device),
                img_ids=ids,
                return_dict=False,
            )[0]
        return output[:, : x[0, 0].numel()].float().transpose(1, 2).reshape(x.shape).contiguous()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[4 C, H / 16, W / 16] of one latent. Raises RecipeError, with the nearest size that fits, for any other, and
        for guidance on a distilled checkpoint."""
        return cast(Any, self.transformer).config.in_channels, *self.checked_latent(sampling)

    def vae_latents(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return F.pixel_shuffle(latents * std + mean, PATCH)

    def of_vae(self, encoded: Tensor) -> Tensor:
        mean, std = self._statistics(encoded)
        return (F.pixel_unshuffle(encoded, PATCH) - mean) / std

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of a patch, by the VAE's batch norm."""
        norm = self.vae.bn
        std = (norm.running_var + self.vae.config.batch_norm_eps).sqrt()
        return norm.running_mean.view(1, -1, 1, 1).to(like), std.view(1, -1, 1, 1).to(like)

    def _source(self, media: Sequence[MediaRef]) -> tuple[Tensor, Tensor]:
        """Tokens [S, 4 C] and positions [S, 4] of a sample's source images, prepared and encoded by the pipeline."""
        pipeline, settings = self.pipeline, cast(Any, self.transformer).config
        if not media:
            none = torch.zeros((0, settings.in_channels), dtype=self.vae.dtype, device=self.device)
            return none, torch.zeros((0, 4), dtype=torch.int64, device=self.device)
        self._check_served("decode", "VAE", "An engine that encodes source images")
        pixels = Sources.pixels(media, pipeline.image_processor, unit=pipeline.vae_scale_factor * PATCH)
        latents, ids = pipeline.prepare_image_latents(
            images=pixels, batch_size=1, generator=None, device=self.device, dtype=self.vae.dtype
        )
        return latents[0], ids[0]
