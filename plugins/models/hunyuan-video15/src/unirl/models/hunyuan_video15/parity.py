# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""diffusers' own pipelines on a checkpoint: what the models are compared with. Nothing of the models is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import ClassifierFreeGuidance, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from PIL import Image
from torch import Tensor
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["call", "run", "run_image"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`HunyuanVideo15Pipeline` in fp32, from `initial`, where that lies. Fits
    `unirl.conformance.reference.RunReference`."""
    pipeline = _loaded(HunyuanVideo15Pipeline, folder, initial)
    size = {"height": sampling.height, "width": sampling.width}
    final, media = call(pipeline, list(prompts), sampling, initial, **size)
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=media)


def run_image(folder: Path, *, inputs: Inputs, sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`HunyuanVideo15ImageToVideoPipeline`, which takes one image in a call: one call for each row. Fits
    `unirl.conformance.reference.RunMediaReference`."""
    pipeline = _loaded(HunyuanVideo15ImageToVideoPipeline, folder, initial)
    runs = [
        call(pipeline, [text], sampling, initial[row : row + 1], image=Image.open(media[0].uri))
        for row, (text, media) in enumerate(zip(inputs.texts, inputs.media, strict=True))
    ]
    final, media = (torch.cat(parts) for parts in zip(*runs, strict=True))
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=media)


def call(
    pipeline: Any, prompts: list[str], sampling: LatentSamplingConfig, initial: Tensor, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Final latents and media of one call.

    The length of prompts and guidance are not arguments of the pipelines but parts of them; that for images takes its
    size from the image.
    """
    pipeline.tokenizer_max_length = sampling.max_sequence_length
    pipeline.guider = ClassifierFreeGuidance(guidance_scale=sampling.guidance_scale)
    # The VAE fails on two videos at once.
    pipeline.vae.use_slicing = True
    decode, finals = pipeline.vae.decode, list[Tensor]()

    def keep(latents: Tensor, **settings: Any) -> Any:
        finals[:] = [latents * pipeline.vae.config.scaling_factor]
        return decode(latents, **settings)

    size = (sampling.height, sampling.width)
    with (
        patch.object(pipeline.vae, "decode", keep),
        patch.object(HunyuanVideo15ImageProcessor, "calculate_default_height_width", lambda *_, **__: size),
    ):
        result = pipeline(
            prompt=prompts,
            negative_prompt=[sampling.negative_prompt] * len(prompts),
            num_frames=sampling.frames,
            num_inference_steps=sampling.num_inference_steps,
            latents=initial,
            output_type="pt",
            **inputs,
        )
    return finals[0], result.frames


def _loaded(kind: Any, folder: Path, initial: Tensor) -> Any:
    pipeline = kind.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
