"""The model against diffusers' QwenImagePipeline."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from beside_diffusers import assert_weights_are_those_of, final_latents, initial_latents
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.model_host.model_files import scheduler_config
from unirl.models.qwen_image import tiny
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build

PROMPTS = ["a red ring on the left", "a dog", "two green discs, one above the other"]
"""Prompts of different lengths, so that the shorter ones are padded and masked."""
NEGATIVES = ["blurry", "", " "]
# The pipeline's scheduler shifts and stretches in fp32, ours in fp64: four spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 2.4e-7
# Four or eight forwards of fp32 arithmetic, from sigmas that differ in their last bits, of latents of order 1.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def packed(x: Tensor) -> Tensor:
    """[N, 4 C, h, w] as the pipeline packs the [N, C, 2 h, 2 w] latents that a user gives it."""
    spread = torch.nn.functional.pixel_shuffle(x, 2)
    return QwenImagePipeline._pack_latents(spread, *spread.shape)


def run_pipeline(
    pipeline: QwenImagePipeline,
    x: Tensor,
    sampling: LatentSamplingConfig,
    *,
    output: str = "latent",
) -> tuple[Tensor, list[tuple[dict[str, Tensor], Tensor]]]:
    """Its result, and what its transformer was given and gave at each call."""
    calls: list[tuple[dict[str, Tensor], Tensor]] = []
    handle = pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    try:
        result = pipeline(
            PROMPTS,
            negative_prompt=NEGATIVES if sampling.guidance_scale != 1 else None,
            true_cfg_scale=sampling.guidance_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=packed(x),
            max_sequence_length=sampling.max_sequence_length,
            output_type=output,
        ).images
    finally:
        handle.remove()
    return result, calls


def sample(model: QwenImageModel, x: Tensor, sampling: LatentSamplingConfig, rows: slice = slice(None)) -> Tensor:
    """Final latents of the shared sampler without noise, of these rows."""
    branches = {"positive": Inputs.of_texts(PROMPTS[rows]), "negative": Inputs.of_texts(NEGATIVES[rows])}
    return final_latents(model, x[rows], sampling, branches)


def test_the_weights_are_those_that_diffusers_loads(model: QwenImageModel, tiny_folder: Path) -> None:
    assert_weights_are_those_of(QwenImagePipeline, tiny_folder, model.pipeline.components)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["ragged", "one"])
def test_conditions_are_those_of_the_pipeline_bit_for_bit(
    model: QwenImageModel, pipeline: QwenImagePipeline, sampling: LatentSamplingConfig, prompts: list[str]
) -> None:
    result = model.encode(Inputs.of_texts(prompts), sampling=sampling)
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=sampling.max_sequence_length)
    longest = embeds.shape[1]
    assert 0 < longest < sampling.max_sequence_length
    mask = torch.ones(embeds.shape[:2]) if mask is None else mask  # None is a batch without padding
    assert torch.equal(result["prompt_embeds"][:, :longest], embeds)
    assert torch.equal(result["prompt_mask"][:, :longest], mask.bool())
    assert torch.count_nonzero(result["prompt_embeds"][:, longest:]) == 0
    assert not result["prompt_mask"][:, longest:].any()


def test_a_prompt_that_is_too_long_is_cut_where_the_pipeline_cuts_it(
    model: QwenImageModel, pipeline: QwenImagePipeline, sampling: LatentSamplingConfig
) -> None:
    prompts = ["a ring, " * 20, "a ring"]
    result = model.encode(Inputs.of_texts(prompts), sampling=sampling)
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=sampling.max_sequence_length)
    assert result["prompt_mask"][0].all()
    assert torch.equal(result["prompt_mask"], mask.bool())
    # The pipeline encodes what it cuts off as well: a causal encoder's sums in another order, states of order 1.
    torch.testing.assert_close(result["prompt_embeds"], embeds, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [4, 28])
def test_the_schedule_is_the_checkpoints_by_formula_and_the_pipelines(
    model: QwenImageModel, pipeline: QwenImagePipeline, sampling: LatentSamplingConfig, steps: int
) -> None:
    """mu on the line through (256, 0.5) and (8192, 0.9), sigma = e^mu / (e^mu + 1/t - 1) of t = 1 - i / T, and 1 - sigma
    stretched so that the last one is 0.02."""
    asked = dataclasses.replace(sampling, num_inference_steps=steps, height=384, width=512)
    num_tokens = (384 // 16) * (512 // 16)
    strength = math.exp(0.5 + (0.9 - 0.5) / (8192 - 256) * (num_tokens - 256))
    shifted = [strength / (strength + 1 / (1 - step / steps) - 1) for step in range(steps)]
    stretch = (1 - 0.02) / (1 - shifted[-1])
    by_formula = torch.tensor([*(1 - stretch * (1 - sigma) for sigma in shifted), 0.0])
    result = model.schedule(asked)
    torch.testing.assert_close(result, by_formula, rtol=0, atol=6e-8)  # the last bit of fp32 below 1
    assert float(result[-2]) == pytest.approx(0.02, abs=1e-8)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    grid = [1 - step / steps for step in range(steps)]
    scheduler.set_timesteps(sigmas=grid, mu=math.log(strength))
    torch.testing.assert_close(result, scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


def test_the_schedule_is_read_from_the_checkpoint(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    """Numbers of the scheduler config that no published checkpoint has reach both the pipeline and the model."""
    other = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.3, max_shift=1.2, max_image_seq_len=1024, shift_terminal=0.1
    )
    tiny.write(tmp_path, seed=0, scheduler=other)
    model = build(QwenImageConfig(path=str(tmp_path)), device="cpu")
    pipeline = QwenImagePipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    run_pipeline(pipeline, initial(model, sampling), sampling)
    result = model.schedule(sampling)
    torch.testing.assert_close(result, pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)
    assert float(result[-2]) == pytest.approx(0.1, abs=1e-7)
    static = dataclasses.replace(sampling, schedule=ScheduleConfig(shift=1.0))
    # A shift of 1 leaves 1, 3/4, 1/2, 1/4; the stretch takes 1/4 to 0.1: 1 - (1 - t) 0.9 / 0.75.
    torch.testing.assert_close(model.schedule(static), torch.tensor([1.0, 0.7, 0.4, 0.1, 0.0]))
    assert scheduler_config(tmp_path)["max_image_seq_len"] == 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit(
    tiny_folder: Path, sampling: LatentSamplingConfig, dtype: str
) -> None:
    """At every step, in 16 bits too: there the pipeline rounds latents, text and timestep, and so does the model."""
    model = build(QwenImageConfig(path=str(tiny_folder), dtype=dtype, text_dtype=dtype, vae_dtype=dtype), device="cpu")
    pipeline = QwenImagePipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    half = getattr(torch, dtype)
    asked = dataclasses.replace(sampling, num_inference_steps=12)
    _, calls = run_pipeline(pipeline, initial(model, sampling).to(half), asked)
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    _, _, height, width = initial(model, sampling).shape
    for step, (given, velocity) in enumerate(calls):
        x = given["hidden_states"].transpose(1, 2).unflatten(2, (height, width)).float()
        sigma = pipeline.scheduler.sigmas[step].expand(len(x))
        with torch.no_grad():
            result = model.velocity(x, sigma, conditions)
        assert result.dtype is torch.float32
        assert torch.equal(result, velocity.float().transpose(1, 2).unflatten(2, (height, width)))


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_final_latents_and_images_without_noise_are_the_pipelines(
    model: QwenImageModel, pipeline: QwenImagePipeline, sampling: LatentSamplingConfig, scale: float
) -> None:
    """The whole way, with guidance too: prompts of different lengths, their own negatives, an oblong image."""
    asked = dataclasses.replace(sampling, guidance_scale=scale)
    x = initial(model, asked)
    latents, calls = run_pipeline(pipeline, x, asked)
    images, _ = run_pipeline(pipeline, x, asked, output="pt")
    assert len(calls) == asked.num_inference_steps * (1 if scale == 1 else 2)
    result = sample(model, x, asked)
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(packed(result), latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == (len(PROMPTS), 3, 32, 48)
    torch.testing.assert_close(decoded, images, rtol=0, atol=LATENT_TOLERANCE)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_prompts_of_different_lengths_batched_are_as_one_by_one(
    model: QwenImageModel, sampling: LatentSamplingConfig, scale: float
) -> None:
    asked = dataclasses.replace(sampling, guidance_scale=scale)
    x = initial(model, asked)
    alone = torch.cat([sample(model, x, asked, slice(row, row + 1)) for row in range(len(x))])
    torch.testing.assert_close(sample(model, x, asked), alone, rtol=0, atol=LATENT_TOLERANCE)
