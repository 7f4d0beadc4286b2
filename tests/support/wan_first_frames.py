"""Wan from a first frame, beside diffusers' `WanImageToVideoPipeline`, which takes one image in a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beside_diffusers import final_latents, initial_latents
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline
from PIL import Image
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame
from unirl.numerics.diffusion.wan_miniature import first_frame

__all__ = ["NEGATIVE", "PROMPTS", "frames_of", "initial", "pipeline_of", "run_pipeline", "sample"]

PROMPTS = ["a red ring rolls to the left", "a dog"]
NEGATIVE = "blurry"

Calls = list[tuple[str, dict[str, Any], Tensor]]

initial = partial(initial_latents, rows=len(PROMPTS))


def frames_of(
    folder: Path, numbers: Sequence[int], texts: Sequence[str] = PROMPTS, *, height: int = 32, width: int = 64
) -> Inputs:
    """Inputs with these texts and the first frames of these numbers, of three sizes, for a video of that size."""
    ids = tuple(map(str, range(len(texts))))
    media = tuple(first_frame(folder, number=number, height=height, width=width) for number in numbers)
    return Inputs(ids=ids, prompts=tuple(texts), texts=tuple(texts), media=media)


def pipeline_of(
    model: WanFirstFrame, scheduler: FlowMatchEulerDiscreteScheduler, **settings: float
) -> WanImageToVideoPipeline:
    """diffusers' pipeline on a model's own components, with Euler steps.

    A convolution's last bit depends on where its weights lie in memory. Conformance compares with a pipeline that was
    loaded apart from the model.
    """
    result = WanImageToVideoPipeline(**{**model.pipeline.components, "scheduler": scheduler}, **settings)
    result.set_progress_bar_config(disable=True)
    return result


def run_pipeline(
    pipeline: WanImageToVideoPipeline,
    x: Tensor,
    sampling: LatentSamplingConfig,
    text: str,
    media: Sequence[MediaRef],
    *,
    output: str = "latent",
    negative: str = NEGATIVE,
) -> tuple[Tensor, Calls]:
    """Its result for one row, and the transformers' name, inputs and output at each call."""
    calls: Calls = []
    hooks = [
        part.register_forward_hook(
            lambda _module, _args, kwargs, out, name=name: calls.append((name, kwargs, out[0])), with_kwargs=True
        )
        for name, part in pipeline.components.items()
        if name.startswith("transformer") and part is not None
    ]
    options: Mapping[str, Any] = sampling.guidance_options
    try:
        result = pipeline(
            Image.open(media[0].uri),
            [text],
            negative_prompt=[negative],
            guidance_scale=sampling.guidance_scale,
            guidance_scale_2=options.get("scale_low"),
            num_frames=sampling.frames,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=x,
            max_sequence_length=sampling.max_sequence_length,
            output_type=output,
        ).frames
    finally:
        for hook in hooks:
            hook.remove()
    return result, calls


def sample(model: WanFirstFrame, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(model, x, sampling, {"positive": inputs, "negative": inputs.negative(NEGATIVE)})
