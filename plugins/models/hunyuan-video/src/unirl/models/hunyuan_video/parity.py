# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""diffusers' own pipeline on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideoPipeline
from torch import Tensor
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["call", "run"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`HunyuanVideoPipeline` in fp32, from `initial`, where that lies. Fits
    `unirl.conformance.reference.RunReference`."""
    pipeline = HunyuanVideoPipeline.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    final, media = call(pipeline, prompts, sampling, initial)
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=media)


def call(
    pipeline: Any, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Final latents and media of one call, with the scale that the transformer is told: 6 unless an option says
    otherwise."""
    finals: list[Tensor] = []

    def keep(_pipeline: object, _step: int, _timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        finals[:] = [tensors["latents"]]
        return tensors

    result = pipeline(
        prompt=list(prompts),
        guidance_scale=sampling.options.get("embedded_guidance", 6.0),
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.frames,
        num_inference_steps=sampling.num_inference_steps,
        latents=initial,
        max_sequence_length=sampling.max_sequence_length,
        output_type="pt",
        callback_on_step_end=keep,
    )
    return finals[0], result.frames
