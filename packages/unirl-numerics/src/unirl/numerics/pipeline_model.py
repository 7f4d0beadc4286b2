"""What models on the components of a diffusers pipeline have in common, so that an adapter holds what is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.errors import RecipeError
from unirl.core.model_files import dtype_of, scheduler_config
from unirl.core.pipeline_config import PipelineConfig, pipeline_settings
from unirl.core.spec import ModelSpec

from .schedules import Variant, sigmas_from_scheduler_config

__all__ = ["PipelineModel"]

C = TypeVar("C", bound=PipelineConfig)


class PipelineModel(ABC):
    """A `unirl.core.roles.DiffusionModel` of images, from text, but for what a derived class says: `spec`,
    `max_sequence_length`, `encode_texts`, `velocity`, `latent_shape`, and how the VAE takes latents.
    """

    spec: ClassVar[ModelSpec]
    max_sequence_length: int
    """Most tokens of a prompt."""
    token_side: int = 1
    """Elements of a latent along each side of a token of the transformer."""

    def __init__(
        self, config: C, *, find: Callable[[C], Path], load: Callable[[Path, C], Any], device: torch.device
    ) -> None:
        """find: gives the folder of the checkpoint.  load: makes a `diffusers.DiffusionPipeline` of it, with a
        `transformer` and a `vae`; what does not train is frozen.

        Raises RecipeError for a setting that cannot be, before anything is found or loaded.
        """
        for key, text in pipeline_settings(config):
            raise RecipeError(f"{key}: {text}")
        folder = find(config)
        pipeline = load(folder, config)
        name = self.spec.name
        self.device = device
        self.dtype = dtype_of(config.dtype, key="model.dtype", model=name)
        self.autocast = None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=name)
        self.pipeline = pipeline.to(device)
        self.scheduler_config = scheduler_config(folder)
        self.transformer: torch.nn.Module = self.pipeline.transformer
        self.vae: Any = self.pipeline.vae
        self._decode_batch = config.decode_batch
        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
                if part is not self.trainable:
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
        """Conditions of each prompt, [n, ...] in the dtype of the text encoders. Equal prompts are encoded once."""
        if media is not None and any(media):
            raise RecipeError(
                f"data: {self.spec.name} generates from text alone, but a prompt has media; leave them out."
            )
        length, most = sampling.max_sequence_length, self.max_sequence_length
        if not 1 <= length <= most:
            raise RecipeError(
                f"sampling.max_sequence_length: {length} was asked for; {self.spec.name} takes 1 to {most}."
            )
        distinct = list(dict.fromkeys(prompts))
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return {name: values[rows] for name, values in self.encode_texts(distinct, length=length).items()}

    @abstractmethod
    def encode_texts(self, texts: Sequence[str], *, length: int) -> Mapping[str, Tensor]:
        """Conditions of these texts, [n, ...]. length: tokens of each, at which a long one is cut."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the transformer takes: its own dtype, or that of autocast."""
        return self.autocast or self.dtype

    @contextmanager
    def computing(self) -> Generator[None]:
        """Around a call of the transformer: autocast, where it is asked for."""
        with torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext():
            yield

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """See `unirl.core.roles.DiffusionModel`."""

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """The checkpoint's own schedule, on the CPU; `sampling.schedule.shift` replaces its shift."""
        _, height, width = self.latent_shape(sampling)
        try:
            return sigmas_from_scheduler_config(
                self.scheduler_config,
                num_steps=sampling.steps,
                image_seq_len=(height // self.token_side) * (width // self.token_side),
                shift=sampling.schedule.shift,
                variant=cast(Variant, sampling.schedule.variant),
            )
        except ValueError as error:
            raise RecipeError(f"sampling.schedule: {error}") from error

    @abstractmethod
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        """[C, H, W] of one latent. Raises RecipeError for a size that cannot be; see `check_image`."""

    def check_image(self, sampling: LatentSamplingConfig, *, unit: int, largest: int | None = None) -> None:
        """Raise RecipeError, with the nearest size that fits, unless one image is asked for whose sides are multiples
        of `unit` up to `largest`, in pixels."""
        if sampling.frames != 1:
            raise RecipeError(
                f"sampling.frames: {sampling.frames} was asked for; {self.spec.name} generates single images."
            )
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            if size % unit == 0 and unit <= size <= (largest or size):
                continue
            around = {max(size // unit, 1) * unit, (size // unit + 1) * unit}
            near = sorted({min(fitting, largest or fitting) for fitting in around})
            limits = f" from {unit} to {largest}" if largest else ""
            raise RecipeError(
                f"sampling.{name}: {size} was asked for; this checkpoint takes multiples of {unit}{limits}. Nearest: "
                f"{' or '.join(map(str, near))}."
            )

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of latents [N, *latent_shape]. Keeps the gradient where it is on."""
        dtype: torch.dtype = self.vae.dtype
        unscaled = self.vae_latents(latents.float()).to(dtype)
        chunks = torch.split(unscaled, self._decode_batch or max(len(latents), 1))
        decoded = torch.cat([self.vae_images(chunk) for chunk in chunks])
        return (decoded.float() / 2 + 0.5).clamp(0, 1)

    def vae_latents(self, latents: Tensor) -> Tensor:
        """What the VAE decodes, fp32, of latents as they are denoised: without scale and shift."""
        settings = self.vae.config
        return latents / settings.scaling_factor + (settings.shift_factor or 0.0)

    def vae_images(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1] that the VAE decodes."""
        return self.vae.decode(latents, return_dict=False)[0]
