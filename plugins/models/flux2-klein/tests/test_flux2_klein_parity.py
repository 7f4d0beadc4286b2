"""The model against diffusers' Flux2KleinPipeline, from text alone and with source images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from beside_diffusers import final_latents, initial_latents
from diffusers import Flux2KleinPipeline
from PIL import Image
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.flux2_klein import tiny
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import Flux2KleinModel, build

PROMPTS = ["a red ring on the left", "a dog", "two green discs, one above the other"]
# Four forwards of fp32 arithmetic, from sigmas that differ in their last bits, of latents of order 1.
LATENT_TOLERANCE = 1e-5

Sources = tuple[MediaRef, ...]

initial = partial(initial_latents, rows=len(PROMPTS))


def inputs_of(sources: Sequence[Sources], prompts: Sequence[str] = PROMPTS) -> Inputs:
    ids = tuple(map(str, range(len(prompts))))
    return Inputs(ids=ids, prompts=tuple(prompts), texts=tuple(prompts), media=tuple(sources))


@pytest.fixture(params=[None, 0, 2], ids=["text", "one-source", "two-sources"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Sources:
    return () if request.param is None else tiny.media(tmp_path, number=request.param)


def run_pipeline(
    pipeline: Flux2KleinPipeline,
    x: Tensor,
    sampling: LatentSamplingConfig,
    sources: Sources,
    *,
    output: str = "latent",
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Its images, final latents [N, C, H, W], and the latents and velocities of each call of its transformer."""
    calls: list[tuple[Tensor, Tensor]] = []
    finals: list[Tensor] = []
    num_tokens = x[0, 0].numel()

    def spatial(tokens: Tensor) -> Tensor:
        return tokens[:, :num_tokens].transpose(1, 2).reshape(x.shape)

    def keep(_pipeline: object, _step: int, _timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        finals[:] = [tensors["latents"]]
        return tensors

    handle = pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((spatial(kwargs["hidden_states"]), spatial(out[0]))),
        with_kwargs=True,
    )
    negative, _ = pipeline.encode_prompt([sampling.negative_prompt] * len(x), max_sequence_length=64)
    try:
        images = pipeline(
            image=[Image.open(ref.uri) for ref in sources] or None,
            prompt=list(PROMPTS),
            negative_prompt_embeds=negative,
            guidance_scale=sampling.guidance_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=x,
            max_sequence_length=sampling.max_sequence_length,
            output_type=output,
            callback_on_step_end=keep,
        ).images
    finally:
        handle.remove()
    return images, spatial(finals[0]), calls


def sample(model: Flux2KleinModel, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(
        model, x, sampling, {"positive": inputs, "negative": inputs.negative(sampling.negative_prompt)}
    )


def test_prompt_embeddings_are_the_pipelines_bit_for_bit(
    model: Flux2KleinModel, pipeline: Flux2KleinPipeline, sampling: LatentSamplingConfig
) -> None:
    prompts = [*PROMPTS, "a ring, " * 20]
    result = model.encode(inputs_of([()] * 4, prompts), sampling=sampling)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(prompts, max_sequence_length=sampling.max_sequence_length)
    assert result.keys() == {"prompt_embeds"}
    assert torch.equal(result["prompt_embeds"], expected)


@pytest.mark.parametrize("steps", [4, 28])
def test_the_schedule_is_that_of_the_fit_and_of_the_pipeline(
    model: Flux2KleinModel, pipeline: Flux2KleinPipeline, sampling: LatentSamplingConfig, steps: int
) -> None:
    """Two lines in the number of tokens, at 10 and at 200 steps; linear in the steps between."""
    asked = dataclasses.replace(sampling, num_inference_steps=steps)
    tokens = (asked.height // 16) * (asked.width // 16)
    at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    strength = math.exp(at_10 + (at_200 - at_10) * (steps - 10) / 190)
    shifted = [strength / (strength + 1 / (1 - step / steps) - 1) for step in range(steps)]
    result = model.schedule(asked)
    torch.testing.assert_close(result, torch.tensor([*shifted, 0.0]), rtol=0, atol=6e-8)  # the last bit of fp32 below 1
    run_pipeline(pipeline, initial(model, asked), asked, ())
    # The pipeline's scheduler computes in fp32, ours in fp64: four spacings of fp32 numbers just below 1.
    torch.testing.assert_close(result, pipeline.scheduler.sigmas, rtol=0, atol=2.4e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit(
    tiny_folder: Path, sampling: LatentSamplingConfig, sources: Sources, dtype: str
) -> None:
    """At every step, in 16 bits too: there the pipeline rounds latents, text and timestep, and so does the model."""
    config = Flux2KleinConfig(path=str(tiny_folder), dtype=dtype, text_dtype=dtype, vae_dtype=dtype)
    model = build(config, device="cpu")
    pipeline = Flux2KleinPipeline(**model.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    asked = dataclasses.replace(sampling, num_inference_steps=6)
    _, _, calls = run_pipeline(pipeline, initial(model, sampling), asked, sources)
    assert len(calls) == 6
    conditions = model.encode(inputs_of([sources] * 3), sampling=sampling)
    for step, (x, velocity) in enumerate(calls):
        with torch.no_grad():
            result = model.velocity(x.float(), pipeline.scheduler.sigmas[step].expand(len(x)), conditions)
        assert result.dtype is torch.float32
        assert torch.equal(result, velocity.float())


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_final_latents_and_images_without_noise_are_the_pipelines(
    model: Flux2KleinModel,
    pipeline: Flux2KleinPipeline,
    sampling: LatentSamplingConfig,
    sources: Sources,
    scale: float,
) -> None:
    """The whole way, with guidance too, which has the sources in both branches; an oblong image."""
    asked = dataclasses.replace(sampling, guidance_scale=scale, negative_prompt="blurry")
    x = initial(model, asked)
    images, latents, calls = run_pipeline(pipeline, x, asked, sources, output="pt")
    assert len(calls) == asked.num_inference_steps * (1 if scale == 1 else 2)
    result = sample(model, x, asked, inputs_of([sources] * 3))
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == (len(PROMPTS), 3, 32, 48)
    torch.testing.assert_close(decoded, images, rtol=0, atol=LATENT_TOLERANCE)


def test_rows_with_different_sources_batched_are_as_one_by_one_and_the_source_matters(
    model: Flux2KleinModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    each: list[Sources] = [tiny.media(tmp_path, number=2), (), tiny.media(tmp_path, number=0)]
    x = initial(model, sampling)
    inputs = inputs_of(each)
    alone = torch.cat([sample(model, x[row : row + 1], sampling, inputs.select([row])) for row in range(3)])
    together = sample(model, x, sampling, inputs)
    torch.testing.assert_close(together, alone, rtol=0, atol=LATENT_TOLERANCE)
    swapped = sample(model, x, sampling, inputs_of([each[2], each[1], each[0]]))
    moved = (swapped - together).flatten(1).abs().max(dim=1).values
    assert min(moved[0], moved[2]) > 1e-2 and moved[1] < LATENT_TOLERANCE


def test_images_encoded_and_decoded_go_through_the_same_statistics(
    model: Flux2KleinModel, pipeline: Flux2KleinPipeline
) -> None:
    """Stored images become the latents that the pipeline makes of a source, and `vae_latents` undoes them."""
    pixels = torch.rand((2, 3, 64, 48), generator=torch.Generator().manual_seed(3))
    result = model.latents_of(pixels)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(2 * pixels - 1, generator=None)
    # One convolution stack on batches of the same size, and a division in another order.
    torch.testing.assert_close(result, expected, rtol=0, atol=LATENT_TOLERANCE)
    torch.testing.assert_close(model.of_vae(model.vae_latents(result)), result, rtol=0, atol=LATENT_TOLERANCE)
