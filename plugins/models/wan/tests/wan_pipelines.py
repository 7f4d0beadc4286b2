"""The models beside diffusers' pipelines, with Euler steps in place of UniPC."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beside_diffusers import final_latents, initial_latents
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan.model import WanModel
from unirl.models.wan.tiny import first_frame

__all__ = [
    "GUIDED",
    "LATENT_TOLERANCE",
    "NEGATIVES",
    "PLAIN",
    "PROMPTS",
    "SCALES",
    "SIGMA_TOLERANCE",
    "SIZES",
    "frames_of",
    "initial",
    "negative",
    "pipeline_of",
    "run_pipeline",
    "sample",
]

PROMPTS = ("a red ring rolls to the left", "a dog")
NEGATIVES = ("blurry", "")
SIZES = [(5, 32, 64), (9, 48, 32)]
"""Frames, height, width."""
PLAIN: dict[str, Any] = {"guidance_scale": 1.0}
GUIDED: dict[str, Any] = {"guidance_scale": 4.0, "guidance_mode": "two-pass"}
SCALES: dict[str, Any] = {
    "guidance_scale": 4.0,
    "guidance_mode": "two-scale",
    "guidance_options": {"scale_low": 1.5, "boundary": 0.875},
}
# The schedulers of diffusers shift in fp32, ours in fp64: two spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 1.2e-7
# Four or eight forwards of fp32 arithmetic, at another batch size from a first frame, from sigmas that differ in their
# last bit, of latents of order 1.
LATENT_TOLERANCE = 1e-5

Calls = list[tuple[str, dict[str, Any], Tensor]]

initial = partial(initial_latents, rows=len(PROMPTS))


def frames_of(
    folder: Path, numbers: Sequence[int], texts: Sequence[str] = PROMPTS, *, height: int = 32, width: int = 64
) -> Inputs:
    """Inputs with these texts and the first frames of these numbers, of three sizes, for a video of that size."""
    ids = tuple(map(str, range(len(texts))))
    media = tuple(first_frame(folder, number=number, height=height, width=width) for number in numbers)
    return Inputs(ids=ids, prompts=tuple(texts), texts=tuple(texts), media=media)


def pipeline_of(model: WanModel, **parts: Any) -> Any:
    """diffusers' pipeline on a model's own components, with Euler steps of the published shift.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a separate test, and conformance compares with a pipeline that was loaded apart from the model.

    parts: components and settings in place of its own.
    """
    kind = WanImageToVideoPipeline if model.spec.inputs else WanPipeline
    own: dict[str, Any] = {
        **model.pipeline.components,
        "scheduler": EulerScheduler(shift=3.0),
        "boundary_ratio": model.pipeline.config.boundary_ratio,
    }
    result = kind(**{**own, **parts})
    result.set_progress_bar_config(disable=True)
    return result


def run_pipeline(
    pipeline: Any, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs, *, output: str = "latent"
) -> tuple[Tensor, Calls]:
    """Its result, and the transformers' name, inputs and output at each call. From a first frame it takes one row."""
    calls: Calls = []
    hooks = [
        part.register_forward_hook(
            lambda _module, _args, kwargs, out, name=name: calls.append((name, kwargs, out[0])), with_kwargs=True
        )
        for name, part in pipeline.components.items()
        if name.startswith("transformer") and part is not None
    ]
    frames = [Image.open(media[0].uri) for media in inputs.media if media]
    try:
        result = pipeline(
            **({"image": frames[0]} if frames else {}),
            prompt=list(inputs.texts),
            negative_prompt=list(NEGATIVES[: len(inputs.texts)]),
            guidance_scale=sampling.guidance_scale,
            guidance_scale_2=sampling.guidance_options.get("scale_low"),
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


def sample(model: WanModel, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs) -> Tensor:
    """Final latents of the shared sampler without noise, with negative prompts as in `run_pipeline`."""
    return final_latents(model, x, sampling, {"positive": inputs, "negative": negative(inputs)})


def negative(inputs: Inputs) -> Inputs:
    """Inputs of the negative branch. Texts of several lengths, where the pipeline takes all rows in one call."""
    return inputs.negative(NEGATIVES[0]) if any(inputs.media) else Inputs.of_texts(NEGATIVES[: inputs.num_rows])
