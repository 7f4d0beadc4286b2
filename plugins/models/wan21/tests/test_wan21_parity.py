"""The model against diffusers' WanPipeline, with Euler steps in place of UniPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from beside_diffusers import assert_weights_are_those_of, final_latents, initial_latents
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from torch import Tensor
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.wan21 import tiny
from unirl.models.wan21.config import Wan21Config
from unirl.models.wan21.model import Wan21Model, build
from unirl.numerics.diffusion.schedules import dynamic_sigmas, flux2_mu, linear_mu

Pipelines = Callable[[Wan21Model], WanPipeline]

PROMPTS = ["a red ring rolls to the left", "a dog"]
NEGATIVES = ["blurry", ""]
SIZES = [(5, 32, 64), (9, 48, 32)]
# The schedulers of diffusers shift in fp32, ours in fp64: two spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 1.2e-7
# Four or eight forwards of fp32 arithmetic, from sigmas that differ in their last bit, of latents of order 1.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def run_pipeline(
    pipeline: WanPipeline, x: Tensor, sampling: LatentSamplingConfig, *, output: str = "latent", **further: float
) -> tuple[Tensor, list[tuple[dict[str, Tensor], Tensor]]]:
    """Its result, and what its transformer was given and gave at each call."""
    calls: list[tuple[dict[str, Tensor], Tensor]] = []
    handle = pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    try:
        result = pipeline(
            PROMPTS,
            negative_prompt=NEGATIVES,
            guidance_scale=sampling.guidance_scale,
            num_frames=sampling.frames,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=x,
            max_sequence_length=sampling.max_sequence_length,
            output_type=output,
            **further,
        ).frames
    finally:
        handle.remove()
    return result, calls


def sample(model: Wan21Model, x: Tensor, sampling: LatentSamplingConfig) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(
        model, x, sampling, {"positive": Inputs.of_texts(PROMPTS), "negative": Inputs.of_texts(NEGATIVES)}
    )


def test_the_weights_are_those_that_diffusers_loads(model: Wan21Model, tiny_folder: Path) -> None:
    assert_weights_are_those_of(WanPipeline, tiny_folder, model.pipeline.components)


def test_conditions_are_those_of_the_pipeline_bit_for_bit(
    model: Wan21Model, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig
) -> None:
    with torch.no_grad():
        positive, negative = on_the_same_weights(model).encode_prompt(PROMPTS, NEGATIVES, max_sequence_length=48)
    assert torch.equal(model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)["prompt_embeds"], positive)
    assert torch.equal(model.encode(Inputs.of_texts(NEGATIVES), sampling=sampling)["prompt_embeds"], negative)


def test_prompts_are_cleaned_as_in_wans_own_code(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    plain, typeset = (
        model.encode(Inputs.of_texts([text]), sampling=sampling)["prompt_embeds"]
        for text in ('a "red" ring', "a “red”  ring\n")
    )
    assert torch.equal(plain, typeset)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_schedule_is_the_shifted_grid_and_that_of_the_euler_scheduler(
    model: Wan21Model, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, steps: int
) -> None:
    """3 t / (1 + 2 t) of t = 1 - i / T."""
    grid = [1.0 - step / steps for step in range(steps + 1)]
    result = model.schedule(dataclasses.replace(sampling, num_inference_steps=steps))
    assert torch.equal(result, torch.tensor([3 * t / (1 + 2 * t) for t in grid]))
    scheduler = on_the_same_weights(model).scheduler
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(result, scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


def test_the_diffusers_default_schedule_is_that_of_the_checkpoints_scheduler(
    model: Wan21Model, sampling: LatentSamplingConfig
) -> None:
    asked = dataclasses.replace(sampling, schedule=ScheduleConfig(variant="diffusers-default"))
    scheduler = UniPCMultistepScheduler.from_config(model.pipeline.scheduler.config)
    scheduler.set_timesteps(4)
    result = model.schedule(asked)
    assert float(result[0]) == 1
    # The first is 1e-6 less there, for the logarithms of the solver.
    torch.testing.assert_close(result, scheduler.sigmas, rtol=0, atol=1.1e-6)
    torch.testing.assert_close(result[1:], scheduler.sigmas[1:], rtol=0, atol=SIGMA_TOLERANCE)


def test_the_shift_is_read_from_the_checkpoint(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    for number, scheduler in enumerate(
        (
            UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
            FlowMatchEulerDiscreteScheduler(shift=5.0),
        )
    ):
        tiny.write(tmp_path / str(number), seed=0, scheduler=scheduler)
        model = build(Wan21Config(path=str(tmp_path / str(number))), device="cpu")
        # 5 t / (1 + 4 t) of 1, 3/4, 1/2, 1/4.
        assert torch.equal(model.schedule(sampling), torch.tensor([1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0]))


@pytest.mark.parametrize("rule", ["linear", "flux2"])
def test_a_dynamic_shift_counts_the_tokens_of_all_frames_by_the_models_rule(
    tmp_path: Path, sampling: LatentSamplingConfig, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    tiny.write(tmp_path, seed=0, scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
    monkeypatch.setattr(Wan21Model, "mu_rule", rule)
    model = build(Wan21Config(path=str(tmp_path)), device="cpu")
    num_tokens = 3 * (32 // 16) * (64 // 16)
    mu = linear_mu(num_tokens) if rule == "linear" else flux2_mu(num_tokens, num_steps=4)
    assert torch.equal(model.schedule(sampling), dynamic_sigmas(4, mu=mu))


def test_a_scheduler_that_is_not_for_flows_is_refused(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    tiny.write(tmp_path, seed=0, scheduler=UniPCMultistepScheduler())
    model = build(Wan21Config(path=str(tmp_path)), device="cpu")
    with pytest.raises(RecipeError, match=r"sampling\.schedule: scheduler config: got use_flow_sigmas = False, exp"):
        model.schedule(sampling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit(
    tiny_folder: Path, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, dtype: str
) -> None:
    """At every step, in 16 bits too: there the pipeline rounds latents and text, and so does the model."""
    model = build(Wan21Config(path=str(tiny_folder), dtype=dtype, text_dtype=dtype), device="cpu")
    pipeline = on_the_same_weights(model)
    _, calls = run_pipeline(pipeline, initial(model, sampling), sampling)
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    assert len(calls) == 4
    for step, (given, velocity) in enumerate(calls):
        with torch.no_grad():
            result = model.velocity(
                given["hidden_states"].float(), pipeline.scheduler.sigmas[step].expand(len(PROMPTS)), conditions
            )
        assert result.dtype is torch.float32
        assert torch.equal(result, velocity.float())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("scale", "mode"), [(1.0, "batched"), (4.0, "batched"), (4.0, "two-pass")])
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    model: Wan21Model,
    on_the_same_weights: Pipelines,
    sampling: LatentSamplingConfig,
    size: tuple[int, int, int],
    scale: float,
    mode: str,
) -> None:
    """The whole way, with guidance too: two sizes, two numbers of frames, prompts of different lengths."""
    frames, height, width = size
    asked = dataclasses.replace(
        sampling, frames=frames, height=height, width=width, guidance_scale=scale, guidance_mode=mode
    )
    x = initial(model, asked)
    pipeline = on_the_same_weights(model)
    latents, _ = run_pipeline(pipeline, x, asked)
    videos, _ = run_pipeline(pipeline, x, asked, output="pt")
    result = sample(model, x, asked)
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == videos.shape == (len(PROMPTS), frames, 3, height, width)
    torch.testing.assert_close(decoded, videos, rtol=0, atol=LATENT_TOLERANCE)
    assert float(decoded.std()) > 0.01


def test_two_scales_are_those_of_the_pipeline_of_wan22(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    """Wan 2.2 has two transformers, a guidance scale each, and a boundary between them; here both are the same one."""
    transformer = model.pipeline.components["transformer"]
    parts = {**model.pipeline.components, "scheduler": EulerScheduler(shift=3.0), "transformer_2": transformer}
    pipeline = WanPipeline(**parts, boundary_ratio=0.8)
    pipeline.set_progress_bar_config(disable=True)
    asked = dataclasses.replace(
        sampling,
        guidance_scale=4.0,
        guidance_mode="two-scale",
        guidance_options={"scale_low": 1.5, "boundary": 0.8},
    )
    sides = [bool(sigma >= 0.8) for sigma in model.schedule(asked)[:-1]]
    assert True in sides and False in sides
    x = initial(model, asked)
    latents, _ = run_pipeline(pipeline, x, asked, guidance_scale_2=1.5)
    result = sample(model, x, asked)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    one = sample(model, x, dataclasses.replace(asked, guidance_mode="two-pass", guidance_options={}))
    assert float((one - latents).abs().max()) > 100 * LATENT_TOLERANCE
