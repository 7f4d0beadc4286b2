# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""First frames of Wan, encoded by diffusers' pipeline with the VAE of the model or of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.first_frame import FirstFrame

from .prompts import FEATURES_LENGTH, wrong_length

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["WanSource"]


class WanSource(FirstFrame):
    """Base of the models and bridges, so that their conditions are the same."""

    crops_frame = False
    max_frame_ratio = 1.05
    """Rounding a size to multiples of 16 changes its ratio by up to that: 16 : 9 is stretched by 3 % for 832 x 480."""

    @staticmethod
    def check_length(sampling: LatentSamplingConfig) -> None:
        """For transformers that read features of the frame. Raises RecipeError for a length of prompts at which they
        would take text for these."""
        if sampling.max_sequence_length != FEATURES_LENGTH:
            raise RecipeError(f"sampling.max_sequence_length: {wrong_length(sampling.max_sequence_length)}")

    @staticmethod
    def source(frame: Any, sampling: LatentSamplingConfig, *, vae: Any, device: Any) -> Tensor:
        """[1, 4 + C, 1 + (F - 1) / 4, H / 8, W / 8] fp32: the mask of given frames, and the latents of a video of the
        first frame with grey ones behind it.

        The frame is stretched to the size of the video. vae: has diffusers' `encode`, `dtype` and `config`.
        """
        from diffusers import WanImageToVideoPipeline
        from diffusers.video_processor import VideoProcessor

        size: dict[str, Any] = {"height": sampling.height, "width": sampling.width}
        parts: Any = SimpleNamespace(
            vae=vae,
            vae_scale_factor_spatial=vae.config.scale_factor_spatial,
            vae_scale_factor_temporal=vae.config.scale_factor_temporal,
            config=SimpleNamespace(expand_timesteps=False),
        )
        pixels = VideoProcessor(vae_scale_factor=parts.vae_scale_factor_spatial).preprocess(frame, **size)
        _, result = WanImageToVideoPipeline.prepare_latents(
            parts,
            pixels.to(device, torch.float32),
            batch_size=1,
            num_frames=sampling.frames,
            dtype=torch.float32,
            device=device,
            latents=torch.empty(0),
            **size,
        )
        return result
