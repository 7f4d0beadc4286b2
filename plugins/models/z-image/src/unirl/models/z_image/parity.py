# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""diffusers' own pipeline on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ZImagePipeline
from torch import Tensor
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["run"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`ZImagePipeline` in fp32, from `initial`, where that lies. Fits `unirl.conformance.reference.RunReference`.

    The pipeline's scale s gives v + s (v - v_negative), so it is one less than ours.
    """
    pipeline = ZImagePipeline.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    finals: list[Tensor] = []

    def keep(_pipeline: object, _step: int, _timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        finals[:] = [tensors["latents"]]
        return tensors

    result: Any = pipeline(
        list(prompts),
        negative_prompt=[sampling.negative_prompt] * len(prompts),
        guidance_scale=sampling.guidance_scale - 1.0,
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        latents=initial,
        max_sequence_length=sampling.max_sequence_length,
        output_type="pt",
        callback_on_step_end=keep,
    )
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=finals[0], media=result.images)
