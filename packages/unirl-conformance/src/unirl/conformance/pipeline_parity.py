"""A pipeline of diffusers on a checkpoint: what a model is compared with. Nothing of the model is used here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from diffusers import (  # exported lazily
    DiffusionPipeline,  # pyright: ignore[reportPrivateImportUsage]
    FlowMatchEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
)
from diffusers.utils import logging as diffusers_logging  # pyright: ignore[reportPrivateImportUsage]
from PIL import Image
from torch import Tensor
from transformers.utils import logging as transformers_logging
from unirl.conformance.reference import ReferenceRun
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.model_files import no_progress_bars

__all__ = ["EulerScheduler", "Layout", "run"]

Layout = Literal["places", "tokens", "channels-last"]
"""Layout of a pipeline's latents: [N, C, (F,) h, w] as in the model, [N, F h w, C], or [N, F, h, w, C]."""


class EulerScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler steps over sigmas that are shifted once: by default they are shifted twice, unless the pipeline passes
    them."""

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, *_: Any, **__: Any) -> None:
        assert num_inference_steps is not None
        grid = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps).tolist()
        super().set_timesteps(sigmas=grid, device=device)


def run(
    folder: Path,
    *,
    prompts: Sequence[str],
    sampling: LatentSamplingConfig,
    initial: Tensor,
    layout: Layout = "places",
    scheduler: Callable[[Any], Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    media: Sequence[Sequence[MediaRef]] = (),
) -> ReferenceRun:
    """The checkpoint's pipeline in fp32, from `initial` [N, C, (F,) h, w], where that lies.

    scheduler: one in place of the checkpoint's, made from its config.  arguments: further ones of its call, such as the
    scale of its guidance; `negative_prompt` is one text for all rows.  media: images of each prompt, for pipelines with
    an argument `image`, which are then called for one row after the other.

    Steps are the scheduler's; one of another solver than Euler's makes Euler steps over its own sigmas.
    """
    load = cast(Any, DiffusionPipeline).from_pretrained
    with no_progress_bars(cast(Any, diffusers_logging), cast(Any, transformers_logging)):
        pipeline: Any = load(folder, dtype=torch.float32, local_files_only=True, use_safetensors=True)
    pipeline.to(initial.device)
    pipeline.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipeline.scheduler = scheduler(pipeline.scheduler.config)
    pipeline.scheduler.__class__ = _watched(type(pipeline.scheduler))
    if not media:
        return _run(pipeline, prompts, sampling, initial, layout, arguments or {})
    runs: list[ReferenceRun] = []
    for row, (prompt, refs) in enumerate(zip(prompts, media, strict=True)):
        images = [Image.open(ref.uri).convert("RGB") for ref in refs]
        given = {**(arguments or {}), "image": images[0] if len(images) == 1 else images}
        runs.append(_run(pipeline, [prompt], sampling, initial[row : row + 1], layout, given))
    finals, pixels = ([cast(Tensor, getattr(each, name)) for each in runs] for name in ("final", "media"))
    return ReferenceRun(sigmas=runs[0].sigmas, final=torch.cat(finals), media=torch.cat(pixels))


def _run(
    pipeline: Any,
    prompts: Sequence[str],
    sampling: LatentSamplingConfig,
    initial: Tensor,
    layout: Layout,
    arguments: Mapping[str, Any],
) -> ReferenceRun:
    state = initial
    if layout == "tokens":
        state = initial.flatten(2).transpose(1, 2)
    elif layout == "channels-last":
        state = initial.movedim(1, -1)
    known = inspect.signature(type(pipeline).__call__).parameters
    every: dict[str, Any] = {
        "prompt": list(prompts),
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.frames,
        "num_inference_steps": sampling.num_inference_steps,
        "max_sequence_length": sampling.max_sequence_length,
        "use_resolution_binning": False,
        "generator": torch.Generator(initial.device).manual_seed(0),
        "latents": state,
        "output_type": "pt",
        "return_dict": False,
        **arguments,
    }
    if "negative_prompt" in arguments:
        every["negative_prompt"] = [arguments["negative_prompt"]] * len(prompts)
    media: Tensor = pipeline(**{name: value for name, value in every.items() if name in known})[0]
    final: Tensor = pipeline.scheduler.reached
    if layout == "tokens":
        final = final.transpose(1, 2).reshape(initial.shape)
    elif layout == "channels-last":
        final = final.movedim(-1, 1)
    return ReferenceRun(sigmas=pipeline.scheduler.sigmas, final=final, media=media.float().clamp(0, 1))


def _watched(own: Any) -> Any:
    """The class of a scheduler that keeps what it has reached."""
    is_euler = issubclass(own, FlowMatchEulerDiscreteScheduler)

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        own.set_timesteps(self, *args, **kwargs)
        self.taken = 0

    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_euler:
            result = own.step(self, model_output, timestep, sample, *args, **kwargs)
            self.reached = result[0]
            return result
        length = float(self.sigmas[self.taken + 1] - self.sigmas[self.taken])
        self.taken += 1
        self.reached = sample.float() + length * model_output.float()
        return (self.reached,)

    # Pipelines look at what it takes.
    set_timesteps.__signature__ = inspect.signature(own.set_timesteps)  # pyright: ignore[reportFunctionMemberAccess]
    return type(own.__name__, (own,), {"set_timesteps": set_timesteps, "step": step})
