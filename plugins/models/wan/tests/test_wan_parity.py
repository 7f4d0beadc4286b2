"""The models from text against diffusers' WanPipeline, with Euler steps in place of UniPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_diffusers import assert_weights_are_those_of
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.wan.model import Wan21Model, Wan22Model
from unirl.numerics.diffusion.schedules import dynamic_sigmas, flux2_mu, linear_mu
from wan_models import FROM_TEXT, built, write
from wan_pipelines import (
    GUIDED,
    LATENT_TOLERANCE,
    NEGATIVES,
    PLAIN,
    PROMPTS,
    SCALES,
    SIGMA_TOLERANCE,
    SIZES,
    initial,
    pipeline_of,
    run_pipeline,
    sample,
)

ModelOf = Callable[[str], Any]
INPUTS = Inputs.of_texts(PROMPTS)


@pytest.fixture
def model(model_of: ModelOf) -> Wan21Model:
    return model_of("wan21")


@pytest.mark.parametrize("name", FROM_TEXT)
def test_the_weights_are_those_that_diffusers_loads(model_of: ModelOf, tiny: Callable[[str], Path], name: str) -> None:
    assert_weights_are_those_of(WanPipeline, tiny(name), model_of(name).pipeline.components)


@pytest.mark.parametrize("name", FROM_TEXT)
def test_conditions_are_those_of_the_pipeline_bit_for_bit(
    model_of: ModelOf, sampling: LatentSamplingConfig, name: str
) -> None:
    model = model_of(name)
    with torch.no_grad():
        expected = pipeline_of(model).encode_prompt(list(PROMPTS), list(NEGATIVES), max_sequence_length=48)
    for texts, embeds in zip((PROMPTS, NEGATIVES), expected, strict=True):
        assert torch.equal(model.encode(Inputs.of_texts(texts), sampling=sampling)["prompt_embeds"], embeds)


def test_prompts_are_cleaned_as_in_wans_own_code(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    plain, typeset = (
        model.encode(Inputs.of_texts([text]), sampling=sampling)["prompt_embeds"]
        for text in ('a "red" ring', "a “red”  ring\n")
    )
    assert torch.equal(plain, typeset)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_schedule_is_the_shifted_grid_and_that_of_the_euler_scheduler(
    model: Wan21Model, sampling: LatentSamplingConfig, steps: int
) -> None:
    """3 t / (1 + 2 t) of t = 1 - i / T."""
    grid = [1.0 - step / steps for step in range(steps + 1)]
    result = model.schedule(dataclasses.replace(sampling, num_inference_steps=steps))
    assert torch.equal(result, torch.tensor([3 * t / (1 + 2 * t) for t in grid]))
    scheduler = pipeline_of(model).scheduler
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
        write("wan21", tmp_path / str(number), scheduler=scheduler)
        model = built("wan21", tmp_path / str(number))
        # 5 t / (1 + 4 t) of 1, 3/4, 1/2, 1/4.
        assert torch.equal(model.schedule(sampling), torch.tensor([1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0]))


@pytest.mark.parametrize("rule", ["linear", "flux2"])
def test_a_dynamic_shift_counts_the_tokens_of_all_frames_by_the_models_rule(
    tmp_path: Path, sampling: LatentSamplingConfig, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    write("wan21", tmp_path, scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
    monkeypatch.setattr(Wan21Model, "mu_rule", rule)
    model = built("wan21", tmp_path)
    num_tokens = 3 * (32 // 16) * (64 // 16)
    mu = linear_mu(num_tokens) if rule == "linear" else flux2_mu(num_tokens, num_steps=4)
    assert torch.equal(model.schedule(sampling), dynamic_sigmas(4, mu=mu))


def test_a_scheduler_that_is_not_for_flows_is_refused(tmp_path: Path, sampling: LatentSamplingConfig) -> None:
    write("wan21", tmp_path, scheduler=UniPCMultistepScheduler())
    model = built("wan21", tmp_path)
    with pytest.raises(RecipeError, match=r"sampling\.schedule: scheduler config: got use_flow_sigmas = False, exp"):
        model.schedule(sampling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit(
    tiny: Callable[[str], Path], sampling: LatentSamplingConfig, dtype: str
) -> None:
    """At every step, in 16 bits too: there the pipeline rounds latents and text, and so does the model."""
    model = built("wan21", tiny("wan21"), dtype=dtype, text_dtype=dtype)
    pipeline = pipeline_of(model)
    _, calls = run_pipeline(pipeline, initial(model, sampling), sampling, INPUTS)
    conditions = model.encode(INPUTS, sampling=sampling)
    assert len(calls) == 4
    for step, (_, given, velocity) in enumerate(calls):
        with torch.no_grad():
            result = model.velocity(
                given["hidden_states"].float(), pipeline.scheduler.sigmas[step].expand(len(PROMPTS)), conditions
            )
        assert result.dtype is torch.float32
        assert torch.equal(result, velocity.float())


BATCHED = {**GUIDED, "guidance_mode": "batched"}
CASES = {
    "one-plain": ("wan21", PLAIN),
    "one-batched": ("wan21", BATCHED),
    "one-two-pass": ("wan21", GUIDED),
    "two-plain": ("wan22", PLAIN),
    "two-two-pass": ("wan22", GUIDED),
    "two-scales": ("wan22", SCALES),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("name", "guidance"), CASES.values(), ids=CASES)
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    model_of: ModelOf,
    sampling: LatentSamplingConfig,
    size: tuple[int, int, int],
    name: str,
    guidance: dict[str, Any],
) -> None:
    """The whole way, with guidance too: two sizes, two numbers of frames, prompts of different lengths."""
    frames, height, width = size
    asked = dataclasses.replace(sampling, frames=frames, height=height, width=width, **guidance)
    model = model_of(name)
    pipeline, x = pipeline_of(model), initial(model, asked)
    latents, calls = run_pipeline(pipeline, x, asked, INPUTS)
    videos, _ = run_pipeline(pipeline, x, asked, INPUTS, output="pt")
    result = sample(model, x, asked, INPUTS)
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == videos.shape == (len(PROMPTS), frames, 3, height, width)
    torch.testing.assert_close(decoded, videos, rtol=0, atol=LATENT_TOLERANCE)
    assert float(decoded.std()) > 0.01

    # The shift of 3 puts four steps at 1, 0.9, 0.75 and 0.5, so that each of two experts has two.
    per_expert = (1 if guidance is PLAIN else 2) * 4 // len(model.experts)
    assert [called for called, _, _ in calls] == [expert for expert in model.experts for _ in range(per_expert)]
    conditions = model.encode(INPUTS, sampling=asked)
    for _, given, velocity in calls[::per_expert]:
        assert torch.equal(given["encoder_hidden_states"], conditions["prompt_embeds"])
        with torch.no_grad():
            result = model.velocity(given["hidden_states"], given["timestep"] / 1000, conditions)
        # Not bit for bit: 1000 (t / 1000) is not t, by a spacing of fp32 numbers.
        torch.testing.assert_close(result, velocity, rtol=0, atol=LATENT_TOLERANCE)


def test_two_scales_are_those_of_a_pipeline_of_two_experts(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    """A guidance scale each, and a boundary between them; here both are the same transformer."""
    transformer = model.pipeline.components["transformer"]
    pipeline = pipeline_of(model, transformer_2=transformer, boundary_ratio=0.8)
    asked = dataclasses.replace(
        sampling,
        guidance_scale=4.0,
        guidance_mode="two-scale",
        guidance_options={"scale_low": 1.5, "boundary": 0.8},
    )
    sides = [bool(sigma >= 0.8) for sigma in model.schedule(asked)[:-1]]
    assert True in sides and False in sides
    x = initial(model, asked)
    latents, _ = run_pipeline(pipeline, x, asked, INPUTS)
    result = sample(model, x, asked, INPUTS)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    one = sample(model, x, dataclasses.replace(asked, guidance_mode="two-pass", guidance_options={}), INPUTS)
    assert float((one - latents).abs().max()) > 100 * LATENT_TOLERANCE


def test_each_row_of_a_batch_goes_to_the_expert_of_its_noise(model_of: ModelOf, sampling: LatentSamplingConfig) -> None:
    model: Wan22Model = model_of("wan22")
    conditions = model.encode(Inputs.of_texts([*PROMPTS, *PROMPTS]), sampling=sampling)
    x = torch.randn(4, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.3, 0.95, 0.875, 0.8749])
    embeds = conditions["prompt_embeds"]
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
        expected = torch.cat(
            [
                model.pipeline.components[name](
                    hidden_states=x[[row]],
                    timestep=1000 * sigma[[row]],
                    encoder_hidden_states=embeds[[row]],
                    return_dict=False,
                )[0]
                for row, name in enumerate(("transformer_2", "transformer", "transformer", "transformer_2"))
            ]
        )
    # Forwards of another batch size, of order 1.
    torch.testing.assert_close(result, expected, rtol=0, atol=LATENT_TOLERANCE)
