"""Stable Diffusion 3 and 3.5 as a diffusion stage, on the components of diffusers' own pipeline.

Source: Stable Diffusion 3, arXiv 2403.03206; verified against diffusers' `StableDiffusion3Pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.errors import RecipeError
from unirl.core.model_files import dtype_of, scheduler_config
from unirl.core.spec import ModelSpec
from unirl.numerics.schedules import Variant, sigmas_from_scheduler_config

from .checkpoint import find, load_pipeline
from .config import Sd3Config
from .plugin import SPEC

__all__ = ["Sd3Model", "build"]

_MAX_SEQUENCE_LENGTH = 512
"""What diffusers' pipeline allows the T5 tokens."""


def build(config: Sd3Config, *, device: Any) -> Sd3Model:
    """The model, its encoders and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return Sd3Model(config, device=torch.device(device))


class Sd3Model:
    """A `unirl.core.roles.DiffusionModel`.

    Conditions: `prompt_embeds` [n, L, D], CLIP and T5 tokens after each other; `pooled` [n, P], both CLIPs.
    """

    spec: ModelSpec = SPEC

    def __init__(self, config: Sd3Config, *, device: torch.device) -> None:
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
        embedder = cast(torch.nn.Module, self.transformer.time_text_embed)
        embedder.register_forward_pre_hook(_refuse_rounded_timestep)

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
        """Conditions of each prompt, in the dtype of the text encoders. Equal prompts are encoded once."""
        if media is not None and any(media):
            raise RecipeError("data: sd3 generates from text alone, but a prompt has media; leave them out.")
        length = sampling.max_sequence_length
        if not 1 <= length <= _MAX_SEQUENCE_LENGTH:
            raise RecipeError(
                f"sampling.max_sequence_length: {length} was asked for; sd3 takes 1 to {_MAX_SEQUENCE_LENGTH}."
            )
        distinct = list(dict.fromkeys(prompts))
        encoded: Any = self.pipeline.encode_prompt(
            prompt=distinct,
            prompt_2=None,  # pyright: ignore[reportArgumentType]  # diffusers takes None for "as prompt"
            prompt_3=None,  # pyright: ignore[reportArgumentType]
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        embeds, _, pooled, _ = encoded
        return {"prompt_embeds": embeds[rows], "pooled": pooled[rows]}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Velocity x1 - x0. The timestep is formed in fp32 and stays so: in bf16 it would be off by up to 2."""
        dtype = self.autocast or self.dtype
        scope = torch.autocast(x.device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with scope:
            velocity = self.transformer(
                hidden_states=x.to(dtype),
                timestep=sigma.float() * 1000.0,
                encoder_hidden_states=conditions["prompt_embeds"].to(dtype),
                pooled_projections=conditions["pooled"].to(dtype),
                return_dict=False,
            )[0]
        return velocity.float()

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """The checkpoint's own schedule, on the CPU; `sampling.schedule.shift` replaces its shift."""
        _, height, width = self.latent_shape(sampling)
        patch = self.pipeline.patch_size
        try:
            return sigmas_from_scheduler_config(
                self.scheduler_config,
                num_steps=sampling.steps,
                image_seq_len=(height // patch) * (width // patch),
                shift=sampling.schedule.shift,
                variant=cast(Variant, sampling.schedule.variant),
            )
        except ValueError as error:
            raise RecipeError(f"sampling.schedule: {error}") from error

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        """[C, H, W] of one latent. Raises RecipeError, with the nearest size that fits, for any other."""
        if sampling.frames != 1:
            raise RecipeError(f"sampling.frames: {sampling.frames} was asked for; sd3 generates single images.")
        factor, patch = self.pipeline.vae_scale_factor, self.pipeline.patch_size
        settings: Any = self.transformer.config
        unit, largest = factor * patch, settings.pos_embed_max_size * factor * patch
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            if size % unit or not unit <= size <= largest:
                below = min(max(size // unit * unit, unit), largest)
                near = " or ".join(str(value) for value in sorted({below, min(below + unit, largest)}))
                raise RecipeError(
                    f"sampling.{name}: {size} was asked for; this checkpoint takes multiples of {unit} from {unit} "
                    f"to {largest}. Nearest: {near}."
                )
        return settings.in_channels, sampling.height // factor, sampling.width // factor

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of latents [N, C, h, w]. Keeps the gradient where it is on."""
        settings = self.vae.config
        latents = latents.float() / settings.scaling_factor + (settings.shift_factor or 0.0)
        chunks = latents.to(self.vae.dtype).split(self._decode_batch or max(len(latents), 1))
        decoded = torch.cat([self.vae.decode(chunk, return_dict=False)[0] for chunk in chunks])
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


def _refuse_rounded_timestep(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """A wrapper that casts the forward's inputs, as FSDP2 does by default, would move sigma without a word."""
    if args[0].dtype is not torch.float32:
        raise RuntimeError(
            f"sd3: the timestep reached the transformer as {args[0].dtype}; it must stay float32. Something that "
            "wraps the transformer casts its inputs; switch that off (FSDP2: cast_forward_inputs=False)."
        )
