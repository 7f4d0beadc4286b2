"""Qwen-Image as a diffusion stage, on the components of diffusers' own pipeline.

Source: Qwen-Image technical report, arXiv 2508.02324; verified against diffusers' `QwenImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.errors import RecipeError
from unirl.core.model_files import dtype_of, scheduler_config
from unirl.core.spec import ModelSpec
from unirl.numerics.schedules import Variant, sigmas_from_scheduler_config

from .checkpoint import find, load_pipeline
from .config import QwenImageConfig
from .plugin import SPEC

__all__ = ["QwenImageModel", "build"]

_PATCH = 2
"""Side of the patches that the pipeline packs into tokens."""


def build(config: QwenImageConfig, *, device: Any) -> QwenImageModel:
    """The model, its encoder and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return QwenImageModel(config, device=torch.device(device))


class QwenImageModel:
    """A `unirl.core.roles.DiffusionModel`.

    Latents: [4 C, H / 16, W / 16], the C channels of the VAE at the four places of a patch, as channels 4 c + 2 y + x.
    A token of the transformer is one place of it, so the norms of "norm-corrected" guidance are those of tokens.
    Conditions: `prompt_embeds` [n, L, D], zeros after the last token; `prompt_mask` [n, L] bool, true up to there.
    """

    spec: ModelSpec = SPEC

    def __init__(self, config: QwenImageConfig, *, device: torch.device) -> None:
        if config.decode_batch < 0:
            raise RecipeError(f"model.decode_batch: {config.decode_batch} was asked for; it must be 0 or more.")
        self.device = device
        self.dtype = dtype_of(config.dtype, key="model.dtype", model=SPEC.name)
        self.autocast = (
            None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=SPEC.name)
        )
        folder = find(config)
        self.pipeline = load_pipeline(folder, config).to(device)
        self.scheduler_config = scheduler_config(folder)
        self.transformer: torch.nn.Module = self.pipeline.transformer
        self.vae: Any = self.pipeline.vae
        self._decode_batch = config.decode_batch
        for name, part in self.pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                part.eval()
                if name != SPEC.trainable:
                    part.requires_grad_(False)

    @property
    def trainable(self) -> torch.nn.Module:
        return self.transformer

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        *,
        sampling: LatentSamplingConfig,
        media: Sequence[Sequence[MediaRef]] | None = None,
    ) -> dict[str, Tensor]:
        """Conditions of each prompt, in the dtype of the text encoder. Equal prompts are encoded once.

        Each prompt stands in the pipeline's template, whose tokens before it are dropped after the encoder has read
        them; those behind it count towards L = `sampling.max_sequence_length`, at which a long prompt is cut.
        """
        if media is not None and any(media):
            raise RecipeError("data: qwen-image generates from text alone, but a prompt has media; leave them out.")
        length, most = sampling.max_sequence_length, self.pipeline.tokenizer_max_length
        if not 1 <= length <= most:
            raise RecipeError(f"sampling.max_sequence_length: {length} was asked for; qwen-image takes 1 to {most}.")
        distinct = list(dict.fromkeys(prompts))
        template, prefix = self.pipeline.prompt_template_encode, self.pipeline.prompt_template_encode_start_idx
        tokenizer, encoder = cast(Any, self.pipeline.tokenizer), cast(Any, self.pipeline.text_encoder)
        tokens = tokenizer(
            [template.format(prompt) for prompt in distinct],
            max_length=prefix + length,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        # Without the language model's head, whose logits over the vocabulary nobody reads.
        states: Tensor = encoder.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False
        ).last_hidden_state
        embeds = states.new_zeros((len(distinct), length, states.shape[-1]))
        mask = torch.zeros((len(distinct), length), dtype=torch.bool, device=self.device)
        for row, is_token in enumerate(tokens.attention_mask.bool()):
            kept = states[row, is_token][prefix:]
            embeds[row, : len(kept)] = kept
            mask[row, : len(kept)] = True
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return {"prompt_embeds": embeds[rows], "prompt_mask": mask[rows]}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The text is cut to the longest prompt of the batch; what is padding then is masked."""
        dtype = self.autocast or self.dtype
        rows, _, height, width = x.shape
        lengths: list[int] = conditions["prompt_mask"].sum(dim=1).tolist()
        longest = max(lengths)
        scope = torch.autocast(x.device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with scope:
            tokens: Tensor = self.transformer(
                hidden_states=x.to(dtype).flatten(2).transpose(1, 2),
                # The pipeline's arithmetic: in 16 bits its timestep is rounded twice.
                timestep=(sigma.float() * 1000.0).to(dtype) / 1000.0,
                encoder_hidden_states=conditions["prompt_embeds"][:, :longest].to(dtype),
                encoder_hidden_states_mask=None if min(lengths) == longest else conditions["prompt_mask"][:, :longest],
                img_shapes=[[(1, height, width)]] * rows,
                return_dict=False,
            )[0]
        return tokens.float().transpose(1, 2).reshape(x.shape).contiguous()

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """The checkpoint's own schedule, on the CPU; `sampling.schedule.shift` replaces its dynamic shift."""
        _, height, width = self.latent_shape(sampling)
        try:
            return sigmas_from_scheduler_config(
                self.scheduler_config,
                num_steps=sampling.steps,
                image_seq_len=height * width,
                shift=sampling.schedule.shift,
                variant=cast(Variant, sampling.schedule.variant),
            )
        except ValueError as error:
            raise RecipeError(f"sampling.schedule: {error}") from error

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        """[4 C, H / 16, W / 16] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        if sampling.frames != 1:
            raise RecipeError(f"sampling.frames: {sampling.frames} was asked for; qwen-image generates single images.")
        unit = self.pipeline.vae_scale_factor * _PATCH
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            if size < unit or size % unit:
                below = max(size // unit * unit, unit)
                near = f"{below} or {below + unit}" if size > unit else str(unit)
                raise RecipeError(
                    f"sampling.{name}: {size} was asked for; qwen-image takes multiples of {unit}. Nearest: {near}."
                )
        settings: Any = self.transformer.config
        return settings.in_channels, sampling.height // unit, sampling.width // unit

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of latents [N, 4 C, h, w]. Keeps the gradient where it is on."""
        settings = self.vae.config
        shape = (1, settings.z_dim, 1, 1)
        mean, std = (
            torch.tensor(numbers, dtype=torch.float32, device=latents.device).view(shape)
            for numbers in (settings.latents_mean, settings.latents_std)
        )
        # The VAE is one of videos: a frame goes in, a frame comes out.
        frames = (F.pixel_shuffle(latents.float(), _PATCH) * std + mean).to(self.vae.dtype)[:, :, None]
        chunks = frames.split(self._decode_batch or max(len(latents), 1))
        decoded = torch.cat([self.vae.decode(chunk, return_dict=False)[0][:, :, 0] for chunk in chunks])
        return (decoded.float() / 2 + 0.5).clamp(0, 1)
