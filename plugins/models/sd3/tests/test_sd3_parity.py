"""The model against diffusers' StableDiffusion3Pipeline.

Where numbers must be equal bit for bit the pipeline runs on the model's own components, which are shown to be those that
diffusers loads: a convolution's last bit depends on where its weights lie in memory. Everything else is compared with a
pipeline that diffusers loaded by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_diffusers import initial_latents
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model, build
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import guided_velocity, make_guidance
from unirl.numerics.diffusion.kernels import make_kernel

Load = Callable[..., StableDiffusion3Pipeline]

PROMPTS = ["a red ring on the left", "a blue square", "two green discs, one above the other"]
NEGATIVE = "blurry"
STEPS = 4
# The scheduler of diffusers shifts in fp32, ours in fp64: the last bit of a sigma may differ.
SIGMA_TOLERANCE = 1.2e-7
# Four forwards of fp32 arithmetic from sigmas that differ in their last bit.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def unshifted(num_steps: int) -> list[float]:
    """The grid that the pipeline's `sigmas` argument wants: its scheduler shifts whatever it is given, once."""
    return np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()


def on_the_same_weights(model: Sd3Model) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_pipeline(
    pipeline: StableDiffusion3Pipeline, latents: Tensor, *, scale: float, output: str, **arguments: Any
) -> tuple[Tensor, list[Tensor]]:
    """Its result and the transformer's output at each step."""
    velocities: list[Tensor] = []
    handle = pipeline.transformer.register_forward_hook(lambda _m, _i, out: velocities.append(out[0]))
    result = pipeline(
        PROMPTS,
        negative_prompt=[NEGATIVE] * len(PROMPTS),
        height=64,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        latents=latents.clone(),
        max_sequence_length=48,
        output_type=output,
        **arguments,
    ).images
    handle.remove()
    return result, velocities


def test_the_weights_are_those_that_diffusers_loads(model: Sd3Model, checkpoint: Path, load_reference: Load) -> None:
    expected = load_reference(checkpoint).components
    for name, part in model.pipeline.components.items():
        if not isinstance(part, torch.nn.Module):
            assert type(part) is type(expected[name])
            continue
        state = part.state_dict()
        assert state.keys() == expected[name].state_dict().keys()
        assert all(torch.equal(weight, state[key]) for key, weight in expected[name].state_dict().items())


def test_conditions_are_those_of_the_pipeline_bit_for_bit(model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    result = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    with torch.no_grad():
        embeds, _, pooled, _ = on_the_same_weights(model).encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=48
        )
    assert torch.equal(result["prompt_embeds"], embeds)
    assert torch.equal(result["pooled"], pooled)


def test_clip_skip_is_that_of_the_pipeline(model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    asked = dataclasses.replace(sampling, options={"clip_skip": 1})
    result = model.encode(Inputs.of_texts(PROMPTS), sampling=asked)
    with torch.no_grad():
        embeds, _, _, _ = on_the_same_weights(model).encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=48, clip_skip=1
        )
    assert torch.equal(result["prompt_embeds"], embeds)
    assert not torch.equal(model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)["prompt_embeds"], embeds)
    with pytest.raises(RecipeError, match=r"sampling\.options\.clip_skip: got 9; this checkpoint takes 0 to 1\."):
        model.encode(Inputs.of_texts(PROMPTS), sampling=dataclasses.replace(sampling, options={"clip_skip": 9}))


def test_a_negative_is_what_the_pipeline_makes_of_a_negative_prompt(
    model: Sd3Model, sampling: LatentSamplingConfig
) -> None:
    with torch.no_grad():
        _, negative, _, pooled = on_the_same_weights(model).encode_prompt(
            PROMPTS[0], None, None, negative_prompt=NEGATIVE, max_sequence_length=48
        )
    result = model.encode(Inputs.of_texts([NEGATIVE]), sampling=sampling)
    assert torch.equal(result["prompt_embeds"], negative)
    assert torch.equal(result["pooled"], pooled)


def test_the_exact_schedule_is_the_grid_shifted_once(
    model: Sd3Model, checkpoint: Path, load_reference: Load, sampling: LatentSamplingConfig
) -> None:
    scheduler = load_reference(checkpoint).scheduler
    shift = scheduler.config.shift
    grid = [1.0 - step / STEPS for step in range(STEPS + 1)]
    by_formula = torch.tensor([shift * t / (1 + (shift - 1) * t) for t in grid])
    scheduler.set_timesteps(sigmas=unshifted(STEPS))
    result = model.schedule(sampling)
    assert torch.equal(result, by_formula)
    torch.testing.assert_close(result, scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


def test_the_diffusers_default_schedule_is_what_the_pipeline_runs(
    model: Sd3Model, checkpoint: Path, load_reference: Load, sampling: LatentSamplingConfig
) -> None:
    pipeline = load_reference(checkpoint)
    run_pipeline(pipeline, initial(model, sampling), scale=1.0, output="latent")
    asked = dataclasses.replace(sampling, schedule=ScheduleConfig(variant="diffusers-default"))
    torch.testing.assert_close(model.schedule(asked), pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


@pytest.mark.parametrize("variant", ["exact", "diffusers-default"])
def test_a_dynamically_shifted_schedule_is_what_the_pipeline_runs(
    tmp_path: Path, load_reference: Load, sampling: LatentSamplingConfig, variant: str
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.4, max_shift=1.3, base_image_seq_len=8, max_image_seq_len=64
    )
    tiny.write(tmp_path, seed=0, scheduler=scheduler)
    model = build(Sd3Config(path=str(tmp_path)), device="cpu")
    pipeline = load_reference(tmp_path)
    arguments = {"sigmas": unshifted(STEPS)} if variant == "exact" else {}
    run_pipeline(pipeline, initial(model, sampling), scale=1.0, output="latent", **arguments)
    # By hand: 16 tokens, mu = .4 + .9 (16 - 8) / 56, and sigma = e^mu / (e^mu + 1/t - 1) of t = 3/4.
    if variant == "exact":
        strength = np.exp(0.4 + 0.9 * 8 / 56)
        assert float(model.schedule(sampling)[1]) == pytest.approx(strength / (strength + 4 / 3 - 1), abs=1e-7)
    asked = dataclasses.replace(sampling, schedule=ScheduleConfig(variant=variant))
    # One more rounding than a static shift: the pipeline's exp(mu) meets an fp32 grid.
    torch.testing.assert_close(model.schedule(asked), pipeline.scheduler.sigmas, rtol=0, atol=2.4e-7)


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_the_first_velocity_is_the_pipelines(model: Sd3Model, sampling: LatentSamplingConfig, scale: float) -> None:
    x = initial(model, sampling)
    _, velocities = run_pipeline(on_the_same_weights(model), x, scale=scale, output="latent")
    positive = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    negative = model.encode(Inputs.of_texts([NEGATIVE] * len(PROMPTS)), sampling=sampling)
    if scale == 1.0:
        with torch.no_grad():
            result = model.velocity(x, torch.ones(len(x)), positive)
        assert torch.equal(result, velocities[0])
        return
    with torch.no_grad():
        result = guided_velocity(
            model.velocity,
            x,
            torch.ones(len(x)),
            conditions={"positive": positive, "negative": negative},
            guidance=make_guidance("batched", scale=scale),
        )
    unconditional, conditional = velocities[0].chunk(2)
    # The negative was encoded in a batch of one here and of three there.
    torch.testing.assert_close(
        result, unconditional + scale * (conditional - unconditional), rtol=0, atol=LATENT_TOLERANCE
    )


@pytest.mark.parametrize("variant", ["exact", "diffusers-default"])
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_final_latents_and_images_without_noise_are_the_pipelines(
    model: Sd3Model,
    checkpoint: Path,
    load_reference: Load,
    sampling: LatentSamplingConfig,
    scale: float,
    variant: str,
) -> None:
    x = initial(model, sampling)
    pipeline = load_reference(checkpoint)
    arguments = {"sigmas": unshifted(STEPS)} if variant == "exact" else {}
    latents, _ = run_pipeline(pipeline, x, scale=scale, output="latent", **arguments)
    images, _ = run_pipeline(pipeline, x, scale=scale, output="pt", **arguments)
    asked = dataclasses.replace(sampling, schedule=ScheduleConfig(variant=variant))
    with torch.no_grad():
        result = denoise(
            model.velocity,
            x,
            sigmas=model.schedule(asked),
            kernel=make_kernel("euler", eta=0.0),
            sde_steps=torch.zeros((len(x), 0), dtype=torch.int64),
            conditions={
                "positive": model.encode(Inputs.of_texts(PROMPTS), sampling=sampling),
                "negative": model.encode(Inputs.of_texts([NEGATIVE] * len(x)), sampling=sampling),
            },
            guidance=make_guidance("batched", scale=scale),
        ).x
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=LATENT_TOLERANCE, atol=LATENT_TOLERANCE)
    torch.testing.assert_close(decoded, images, rtol=0, atol=LATENT_TOLERANCE)


def test_the_image_of_a_latent_is_the_pipelines_bit_for_bit(model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    x, pipeline = initial(model, sampling), on_the_same_weights(model)
    latents, _ = run_pipeline(pipeline, x, scale=1.0, output="latent")
    images, _ = run_pipeline(pipeline, x, scale=1.0, output="pt")
    with torch.no_grad():
        assert torch.equal(model.decode(latents), images)


def test_without_t5_the_conditions_are_still_the_pipelines(
    tmp_path: Path, load_reference: Load, tiny_folder: Path, sampling: LatentSamplingConfig
) -> None:
    tiny.write(tmp_path, seed=0, with_t5=False)
    model = build(Sd3Config(path=str(tmp_path)), device="cpu")
    assert model.pipeline.text_encoder_3 is None
    bare = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    switched = build(Sd3Config(path=str(tiny_folder), use_t5=False), device="cpu").encode(
        Inputs.of_texts(PROMPTS), sampling=sampling
    )
    with torch.no_grad():
        pipeline = load_reference(tmp_path, text_encoder_3=None, tokenizer_3=None)
        embeds, _, pooled, _ = pipeline.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=48
        )
    torch.testing.assert_close(bare["prompt_embeds"], embeds, rtol=0, atol=LATENT_TOLERANCE)
    torch.testing.assert_close(bare["pooled"], pooled, rtol=0, atol=LATENT_TOLERANCE)
    assert torch.count_nonzero(bare["prompt_embeds"][:, -48:]) == 0
    assert bare["prompt_embeds"].shape == switched["prompt_embeds"].shape
