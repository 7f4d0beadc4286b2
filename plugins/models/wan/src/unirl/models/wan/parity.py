"""diffusers' own pipelines on a checkpoint: the reference of the models, whose code is not used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.conformance.pipeline_parity import run as run_pipeline
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["run", "run_i2v"]


def run(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """`WanPipeline` in fp32, on the device of `initial`, from it. Fits `unirl.conformance.reference.RunReference`.

    The UniPC scheduler of the checkpoint is replaced by Euler steps of the same shift. Guidance `two-scale` is its
    `guidance_scale_2`.
    """
    return _run(folder, prompts, sampling, initial)


def run_i2v(folder: Path, *, inputs: Inputs, sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """The same for `WanImageToVideoPipeline`, which takes one image in a call: one call for each row. Fits
    `unirl.conformance.reference.RunMediaReference`."""
    return _run(folder, inputs.texts, sampling, initial, inputs.media)


def _run(
    folder: Path,
    prompts: Sequence[str],
    sampling: LatentSamplingConfig,
    initial: Tensor,
    media: Sequence[Sequence[MediaRef]] = (),
) -> ReferenceRun:
    low = sampling.guidance_options.get("scale_low", 3.0) if sampling.guidance_mode == "two-scale" else None
    arguments: dict[str, Any] = {
        "negative_prompt": sampling.negative_prompt,
        "guidance_scale": sampling.guidance_scale,
        "guidance_scale_2": low,
    }
    return run_pipeline(
        folder,
        prompts=prompts,
        sampling=sampling,
        initial=initial,
        scheduler=lambda config: EulerScheduler(shift=config.flow_shift),
        arguments=arguments,
        media=media,
    )
