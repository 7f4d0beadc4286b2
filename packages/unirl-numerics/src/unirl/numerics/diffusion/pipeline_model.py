"""Base class of models built on the components of a diffusers pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.diffusion.pipeline_config import PipelineConfig
from unirl.numerics.model_files import dtype_of, scheduler_config

from .schedules import Variant, sigmas_from_scheduler_config

__all__ = ["PipelineModel"]

C = TypeVar("C", bound=PipelineConfig)


class PipelineModel(ABC):
    """A text-to-image `unirl.core.roles.DiffusionModel`. A subclass provides `spec`, `max_sequence_length`,
    `encode_texts`, `velocity`, `latent_shape`, and how latents enter the VAE.
    """

    spec: ClassVar[ModelSpec]
    max_sequence_length: int
    """Maximum number of prompt tokens."""
    token_side: int = 1
    """Patch size: side of a transformer token, in latent elements."""

    def __init__(
        self, config: C, *, find: Callable[[C], Path], load: Callable[[Path, C], Any], device: torch.device
    ) -> None:
        """find: returns the folder of the checkpoint.  load: loads a `diffusers.DiffusionPipeline` from it, with a
        `transformer` and a `vae`; all but the transformer is frozen.

        Raises RecipeError for an invalid setting, before anything is looked up or loaded.
        """
        check_config(config, key="model")
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
    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Conditions of each input's text, [n, ...] in the dtype of the text encoders."""
        length, most = sampling.max_sequence_length, self.max_sequence_length
        if not 1 <= length <= most:
            raise RecipeError(f"sampling.max_sequence_length: got {length}; {self.spec.name} takes 1 to {most}.")
        return self.encode_texts(inputs.texts, length=length)

    @abstractmethod
    def encode_texts(self, texts: Sequence[str], *, length: int) -> Mapping[str, Tensor]:
        """Conditions of these prompts, [n, ...]. length: tokens per prompt; longer prompts are truncated."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that the transformer computes in: its own, or that of autocast."""
        return self.autocast or self.dtype

    @contextmanager
    def computing(self) -> Generator[None]:
        """Context for a call of the transformer: autocast, if set."""
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
                num_steps=sampling.num_inference_steps,
                image_seq_len=(height // self.token_side) * (width // self.token_side),
                shift=sampling.schedule.shift,
                variant=cast(Variant, sampling.schedule.variant),
            )
        except ValueError as error:
            raise RecipeError(f"sampling.schedule: {error}") from error

    @abstractmethod
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        """[C, H, W] of one latent. Raises RecipeError for an invalid size; see `check_image`."""

    def check_image(self, sampling: LatentSamplingConfig, *, unit: int, largest: int | None = None) -> None:
        """Raise RecipeError, with the nearest valid size, unless the request is for one image whose sides are multiples
        of `unit` up to `largest`, in pixels."""
        if sampling.frames != 1:
            raise RecipeError(f"sampling.frames: got {sampling.frames}; {self.spec.name} generates single images.")
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            if size % unit == 0 and unit <= size <= (largest or size):
                continue
            around = {max(size // unit, 1) * unit, (size // unit + 1) * unit}
            near = sorted({min(fitting, largest or fitting) for fitting in around})
            limits = f" from {unit} to {largest}" if largest else ""
            raise RecipeError(
                f"sampling.{name}: got {size}, expected a multiple of {unit}{limits}. Nearest: "
                f"{' or '.join(map(str, near))}."
            )

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of latents [N, *latent_shape]. Differentiable."""
        dtype: torch.dtype = self.vae.dtype
        unscaled = self.vae_latents(latents.float()).to(dtype)
        chunks = torch.split(unscaled, self._decode_batch or max(len(latents), 1))
        decoded = torch.cat([self.vae_images(chunk) for chunk in chunks])
        return (decoded.float() / 2 + 0.5).clamp(0, 1)

    def vae_latents(self, latents: Tensor) -> Tensor:
        """Denoised latents with scale and shift undone, fp32: the VAE's input."""
        settings = self.vae.config
        return latents / settings.scaling_factor + (settings.shift_factor or 0.0)

    def vae_images(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1], decoded by the VAE."""
        return self.vae.decode(latents, return_dict=False)[0]
