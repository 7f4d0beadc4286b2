# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""diffusers' own pipeline on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import QwenImagePipeline
from torch import Tensor
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["run"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`QwenImagePipeline` in fp32, from `initial`, where that lies. Fits `unirl.conformance.reference.RunReference`.

    The pipeline packs and unpacks patches by itself. It knows a guidance scale of 1 as none, and no negatives then.
    """
    pipeline = QwenImagePipeline.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    images = F.pixel_shuffle(initial, 2)
    is_guided = sampling.guidance_scale != 1.0
    finals: list[Tensor] = []

    def keep(_pipeline: object, _step: int, _timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        finals[:] = [tensors["latents"]]
        return tensors

    result: Any = pipeline(
        list(prompts),
        negative_prompt=[sampling.negative_prompt] * len(prompts) if is_guided else None,
        true_cfg_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        latents=pipeline._pack_latents(images, *images.shape),  # pyright: ignore[reportPrivateUsage]
        max_sequence_length=sampling.max_sequence_length,
        output_type="pt",
        callback_on_step_end=keep,
    )
    unpacked = pipeline._unpack_latents(  # pyright: ignore[reportPrivateUsage]
        finals[0], sampling.height, sampling.width, pipeline.vae_scale_factor
    )
    final = F.pixel_unshuffle(unpacked[:, :, 0], 2)
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=result.images)
