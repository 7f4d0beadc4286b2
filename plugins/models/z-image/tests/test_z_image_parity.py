"""The model against diffusers' ZImagePipeline."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from beside_diffusers import final_latents, initial_latents
from diffusers import ZImagePipeline
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.z_image import tiny
from unirl.models.z_image.config import ZImageConfig
from unirl.models.z_image.model import ZImageModel, build

PROMPTS = ["a red ring on the left", "a dog", "two green discs, one above the other"]
"""Between 32 and 96 tokens in the template: two of them in blocks of 64, one in a block of 96, so that a batch is masked."""
NEGATIVES = ["blurry", "", " "]
# Four forwards of fp32 arithmetic, from sigmas that differ in their last bits, of latents of order 1.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def run_pipeline(
    pipeline: ZImagePipeline, x: Tensor, sampling: LatentSamplingConfig, *, output: str = "latent"
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Its result, and the latents [N, C, H, W] and what its transformer gave for them at each call."""
    calls: list[tuple[Tensor, Tensor]] = []
    handle = pipeline.transformer.register_forward_hook(
        lambda _module, args, out: calls.append((torch.stack(args[0]).squeeze(2), torch.stack(out[0]).squeeze(2)))
    )
    try:
        result = pipeline(
            list(PROMPTS),
            negative_prompt=list(NEGATIVES),
            guidance_scale=sampling.guidance_scale - 1,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=x,
            max_sequence_length=sampling.max_sequence_length,
            output_type=output,
        ).images
    finally:
        handle.remove()
    return result, calls


def sample(model: ZImageModel, x: Tensor, sampling: LatentSamplingConfig, rows: slice = slice(None)) -> Tensor:
    """Final latents of the shared sampler without noise, of these rows."""
    branches = {"positive": Inputs.of_texts(PROMPTS[rows]), "negative": Inputs.of_texts(NEGATIVES[rows])}
    return final_latents(model, x[rows], sampling, branches)


def test_conditions_are_those_of_the_pipeline_bit_for_bit(
    model: ZImageModel, pipeline: ZImagePipeline, sampling: LatentSamplingConfig
) -> None:
    result = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=sampling.max_sequence_length
        )
    lengths = result["prompt_mask"].sum(dim=1).tolist()
    assert lengths == [len(one) for one in expected] and len(set(lengths)) == 3
    for row, one in enumerate(expected):
        assert torch.equal(result["prompt_embeds"][row, : len(one)], one)
        assert torch.count_nonzero(result["prompt_embeds"][row, len(one) :]) == 0
        assert result["prompt_mask"][row, : len(one)].all()


def test_a_prompt_that_is_too_long_is_cut_where_the_pipeline_cuts_it(
    model: ZImageModel, pipeline: ZImagePipeline, sampling: LatentSamplingConfig
) -> None:
    prompts = ["a ring, " * 20]
    result = model.encode(Inputs.of_texts(prompts), sampling=sampling)
    with torch.no_grad():
        (expected,), _ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=sampling.max_sequence_length
        )
    assert len(expected) == sampling.max_sequence_length and result["prompt_mask"].all()
    assert torch.equal(result["prompt_embeds"][0], expected)


@pytest.mark.parametrize(("shift", "steps"), [(6.0, 4), (3.0, 8)], ids=["base", "turbo"])
def test_the_schedule_is_the_checkpoints_shift_of_a_uniform_grid(
    tmp_path: Path, sampling: LatentSamplingConfig, shift: float, steps: int
) -> None:
    tiny.write(tmp_path, seed=0, shift=shift)
    model = build(ZImageConfig(path=str(tmp_path)), device="cpu")
    asked = dataclasses.replace(sampling, num_inference_steps=steps)
    grid = [1 - step / steps for step in range(steps)]
    by_formula = torch.tensor([*(shift * t / (1 + (shift - 1) * t) for t in grid), 0.0])
    torch.testing.assert_close(model.schedule(asked), by_formula, rtol=0, atol=6e-8)  # the last bit of fp32 below 1
    pipeline = ZImagePipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    run_pipeline(pipeline, initial(model, asked), asked)
    # The pipeline's scheduler computes in fp32, ours in fp64: four spacings of fp32 numbers just below 1.
    torch.testing.assert_close(model.schedule(asked), pipeline.scheduler.sigmas, rtol=0, atol=2.4e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit(
    tiny_folder: Path, sampling: LatentSamplingConfig, dtype: str
) -> None:
    """At every step, in 16 bits too, where the pipeline rounds latents and prompts, and not the time."""
    model = build(ZImageConfig(path=str(tiny_folder), dtype=dtype, text_dtype=dtype, vae_dtype=dtype), device="cpu")
    pipeline = ZImagePipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    asked = dataclasses.replace(sampling, num_inference_steps=12)
    _, calls = run_pipeline(pipeline, initial(model, sampling), asked)
    assert len(calls) == 12
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    for step, (x, output) in enumerate(calls):
        assert x.dtype is getattr(torch, dtype)
        with torch.no_grad():
            result = model.velocity(x.float(), pipeline.scheduler.sigmas[step].expand(len(x)), conditions)
        assert result.dtype is torch.float32
        assert torch.equal(result, -output.float())


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_final_latents_and_images_without_noise_are_the_pipelines(
    model: ZImageModel, pipeline: ZImagePipeline, sampling: LatentSamplingConfig, scale: float
) -> None:
    """The whole way, with guidance too: prompts of different lengths, their own negatives, an oblong image."""
    asked = dataclasses.replace(sampling, guidance_scale=scale)
    x = initial(model, asked)
    latents, calls = run_pipeline(pipeline, x, asked)
    images, _ = run_pipeline(pipeline, x, asked, output="pt")
    assert all(len(given) == len(PROMPTS) * (1 if scale == 1 else 2) for given, _ in calls)
    result = sample(model, x, asked)
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == (len(PROMPTS), 3, 32, 48)
    torch.testing.assert_close(decoded, images, rtol=0, atol=LATENT_TOLERANCE)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_prompts_of_different_lengths_batched_are_as_one_by_one(
    model: ZImageModel, sampling: LatentSamplingConfig, scale: float
) -> None:
    asked = dataclasses.replace(sampling, guidance_scale=scale)
    x = initial(model, asked)
    alone = torch.cat([sample(model, x, asked, slice(row, row + 1)) for row in range(len(x))])
    torch.testing.assert_close(sample(model, x, asked), alone, rtol=0, atol=LATENT_TOLERANCE)


def test_rows_of_different_sigma_are_as_one_by_one(model: ZImageModel, sampling: LatentSamplingConfig) -> None:
    x, sigma = initial(model, sampling), torch.tensor([0.9, 0.5, 0.1])
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    with torch.no_grad():
        together = model.velocity(x, sigma, conditions)
        for row in range(3):
            own = {name: value[row : row + 1] for name, value in conditions.items()}
            alone = model.velocity(x[row : row + 1], sigma[row : row + 1], own)
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=LATENT_TOLERANCE)
