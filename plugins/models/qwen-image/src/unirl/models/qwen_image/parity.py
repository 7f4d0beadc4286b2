# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportPrivateUsage=false
"""diffusers' own pipelines on a checkpoint: what the models are compared with. Nothing of the models is used here but
the loader of the processor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

from .checkpoint import load_processor
from .plugin import EDIT, EDIT_PLUS

__all__ = ["run", "run_edit", "run_edit_plus", "scaling_sources", "tell_token_types"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`QwenImagePipeline` in fp32, from `initial`, where that lies. Fits `unirl.conformance.reference.RunReference`.

    The pipeline packs and unpacks patches by itself. It knows a guidance scale of 1 as none, and no negatives then.
    """
    pipeline = _loaded(QwenImagePipeline, folder, initial)
    return _run(pipeline, prompts, sampling, initial, max_sequence_length=sampling.max_sequence_length)


def run_edit(folder: Path, *, inputs: Inputs, sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`QwenImageEditPipeline`, which takes images of one size in a call: one call for each row. Fits
    `unirl.conformance.reference.RunMediaReference`."""
    pipeline = _loaded(QwenImageEditPipeline, folder, initial, processor=load_processor(folder))
    tell_token_types(pipeline)
    with scaling_sources(EDIT.trial["source_area"]):
        return _run_rows(pipeline, inputs, sampling, initial, lambda images: images[0])


def run_edit_plus(folder: Path, *, inputs: Inputs, sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """The same for `QwenImageEditPlusPipeline`, which takes one prompt in a call."""
    pipeline = _loaded(QwenImageEditPlusPipeline, folder, initial, processor=load_processor(folder))
    tell_token_types(pipeline)
    with scaling_sources(**EDIT_PLUS.trial):
        return _run_rows(pipeline, inputs, sampling, initial, lambda images: images)


@contextmanager
def scaling_sources(source_area: int, condition_area: int = 384 * 384) -> Generator[None]:
    """Context in which the pipelines scale source images to these areas instead of to the 1024 x 1024 pixels that are
    written into them."""
    scaled = pipeline_qwenimage_edit.calculate_dimensions
    with (
        patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda _area, ratio: scaled(source_area, ratio)),
        patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", source_area),
        patch.object(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", condition_area),
    ):
        yield


def tell_token_types(pipeline: Any) -> Any:
    """Give the text encoder of an editing pipeline what it needs with transformers 5 to know images from text, and the
    pipeline leaves out: https://github.com/huggingface/diffusers/issues/14194. Returns the handle that undoes it."""
    image = pipeline.text_encoder.config.image_token_id

    def added(_module: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"mm_token_type_ids": (kwargs["input_ids"] == image).int(), **kwargs}

    return pipeline.text_encoder.register_forward_pre_hook(added, with_kwargs=True)


def _loaded(kind: Any, folder: Path, initial: Tensor, **parts: Any) -> Any:
    pipeline = kind.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, **parts, trust_remote_code=False
    )
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _run_rows(
    pipeline: Any,
    inputs: Inputs,
    sampling: LatentSamplingConfig,
    initial: Tensor,
    given: Callable[[list[Image.Image]], Any],
) -> ReferenceRun:
    """given: what the pipeline takes as the images of a row."""
    runs: list[ReferenceRun] = []
    for row, (text, media) in enumerate(zip(inputs.texts, inputs.media, strict=True)):
        images = [Image.open(ref.uri) for ref in media]
        runs.append(_run(pipeline, [text], sampling, initial[row : row + 1], image=given(images)))
    final, media = (torch.cat([getattr(one, name) for one in runs]) for name in ("final", "media"))
    return ReferenceRun(sigmas=runs[0].sigmas, final=final, media=media)


def _run(
    pipeline: Any, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor, **settings: Any
) -> ReferenceRun:
    images = F.pixel_shuffle(initial, 2)
    is_guided = sampling.guidance_scale != 1.0
    finals: list[Tensor] = []

    def keep(_pipeline: object, _step: int, _timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        finals[:] = [tensors["latents"]]
        return tensors

    result: Any = pipeline(
        prompt=list(prompts),
        negative_prompt=[sampling.negative_prompt] * len(prompts) if is_guided else None,
        true_cfg_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.num_inference_steps,
        latents=pipeline._pack_latents(images, *images.shape),
        output_type="pt",
        callback_on_step_end=keep,
        **settings,
    )
    unpacked = pipeline._unpack_latents(finals[0], sampling.height, sampling.width, pipeline.vae_scale_factor)
    final = F.pixel_unshuffle(unpacked[:, :, 0], 2)
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=result.images)
