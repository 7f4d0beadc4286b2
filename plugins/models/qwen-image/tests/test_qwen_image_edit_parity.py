"""The editing models against diffusers' QwenImageEditPipeline and QwenImageEditPlusPipeline, whose text encoder is told
which tokens are of images, and once as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_diffusers import final_latents, initial_latents
from PIL import Image
from qwen_image_editors import AREAS, Editor
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.qwen_image import edit, tiny
from unirl.models.qwen_image.config import QwenImageEditPlusConfig
from unirl.models.qwen_image.edit import QwenImageEditModel

pytestmark = pytest.mark.slow

PROMPTS = ["make it red", "a dog beside it", "two green discs, one above the other, and no background"]
NEGATIVE = "blurry"
# The pipeline's scheduler shifts and stretches in fp32, ours in fp64: four spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 2.4e-7
# Eight forwards of fp32 arithmetic at another batch size, from sigmas that differ in their last bits, of latents of order 1.
LATENT_TOLERANCE = 1e-5

Sources = tuple[MediaRef, ...]
Calls = list[tuple[dict[str, Any], Tensor]]

initial = partial(initial_latents, rows=len(PROMPTS))


def inputs_of(sources: Sequence[Sources], prompts: Sequence[str] = PROMPTS) -> Inputs:
    ids = tuple(map(str, range(len(prompts))))
    return Inputs(ids=ids, prompts=tuple(prompts), texts=tuple(prompts), media=tuple(sources))


def packed(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def run_pipeline(
    pipeline: Any, x: Tensor, sampling: LatentSamplingConfig, prompt: str, sources: Sources, *, output: str = "latent"
) -> tuple[Tensor, Calls]:
    """Its result for one row, and what its transformer was given and gave at each call."""
    calls: Calls = []
    handle = pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    images = [Image.open(ref.uri) for ref in sources]
    try:
        result = pipeline(
            image=images if len(images) > 1 else images[0],
            prompt=[prompt],
            negative_prompt=[NEGATIVE] if sampling.guidance_scale != 1 else None,
            true_cfg_scale=sampling.guidance_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=packed(x),
            output_type=output,
        ).images
    finally:
        handle.remove()
    return result, calls


def sample(model: QwenImageEditModel, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(model, x, sampling, {"positive": inputs, "negative": inputs.negative(NEGATIVE)})


def assert_given_as_by_the_pipeline(
    model: QwenImageEditModel, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs, call: tuple[Any, Tensor]
) -> None:
    """Conditions, source latents, shapes and the velocity of a call of the pipeline's transformer, bit for bit."""
    given, output = call
    conditions = model.encode(inputs, sampling=sampling)
    tokens = x[0, 0].numel()
    assert torch.equal(conditions["prompt_embeds"][0], given["encoder_hidden_states"][0])
    assert given["encoder_hidden_states_mask"] is None
    assert torch.equal(conditions["source"][0], given["hidden_states"][0, tokens:])
    assert [(1, *x.shape[2:]), *map(tuple, conditions["source_shapes"][0].tolist())] == given["img_shapes"][0]
    with torch.no_grad():
        velocity = model.velocity(x.float(), given["timestep"].float(), conditions)
    assert velocity.dtype is torch.float32
    assert torch.equal(packed(velocity), output[:, :tokens].float())


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("size", [(32, 48), (64, 32)])
def test_conditions_and_velocities_are_the_pipelines_bit_for_bit(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path, number: int, size: tuple[int, int]
) -> None:
    """Both branches, with one source and two, of three ratios."""
    height, width = size
    asked = dataclasses.replace(sampling, num_inference_steps=2, height=height, width=width, guidance_scale=4.0)
    sources = editor.sources(tmp_path, number=number)
    x = initial(editor.model, asked, rows=1)
    _, calls = run_pipeline(editor.pipeline, x, asked, PROMPTS[number], sources)
    inputs = inputs_of([sources], PROMPTS[number : number + 1])
    assert len(calls) == 4
    for branch, call in zip((inputs, inputs.negative(NEGATIVE)), calls[:2], strict=True):
        assert_given_as_by_the_pipeline(editor.model, x, asked, branch, call)


@pytest.mark.usefixtures("small_areas")
def test_without_token_types_conditions_are_those_of_the_pipeline_as_it_is(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    """Which does not tell the text encoder where images are; with types the conditions are others."""
    model = editor.built(token_types=False)
    pipeline = editor.pipeline_of(model, token_types=False)
    asked = dataclasses.replace(sampling, num_inference_steps=2, guidance_scale=4.0)
    sources = editor.sources(tmp_path, number=0)
    x = initial(model, asked, rows=1)
    _, calls = run_pipeline(pipeline, x, asked, PROMPTS[0], sources)
    inputs = inputs_of([sources], PROMPTS[:1])
    for branch, call in zip((inputs, inputs.negative(NEGATIVE)), calls[:2], strict=True):
        assert_given_as_by_the_pipeline(model, x, asked, branch, call)
    plain, told = (one.encode(inputs, sampling=asked)["prompt_embeds"][0] for one in (model, editor.model))
    # Further than any rounding: states are of order 1.
    assert float((plain - told).abs().max()) > 1e-2


def test_the_default_areas_are_those_of_the_pipeline(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    """1024 x 1024 pixels for the VAE, and for the text encoder as many or 384 x 384."""
    model = editor.with_default_areas()
    asked = dataclasses.replace(sampling, num_inference_steps=2)
    sources = editor.sources(tmp_path, number=1)
    x = initial(model, asked, rows=1)
    _, (call, _) = run_pipeline(editor.pipeline_of(model), x, asked, PROMPTS[0], sources)
    assert_given_as_by_the_pipeline(model, x, asked, inputs_of([sources], PROMPTS[:1]), call)


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocities_are_the_pipelines_bit_for_bit_at_every_step_in_16_bits_too(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path, dtype: str
) -> None:
    """There the pipeline rounds latents, sources, text and timestep, and so does the model."""
    model = editor.built(dtype=dtype, text_dtype=dtype, vae_dtype=dtype)
    pipeline = editor.pipeline_of(model)
    asked = dataclasses.replace(sampling, num_inference_steps=6)
    sources = editor.sources(tmp_path, number=0)
    x = initial(model, asked, rows=1).to(getattr(torch, dtype))
    _, calls = run_pipeline(pipeline, x, asked, PROMPTS[0], sources)
    assert len(calls) == 6
    conditions = model.encode(inputs_of([sources], PROMPTS[:1]), sampling=asked)
    tokens = x[0, 0].numel()
    for step, (given, output) in enumerate(calls):
        before = given["hidden_states"][:, :tokens].transpose(1, 2).reshape(x.shape).float()
        with torch.no_grad():
            velocity = model.velocity(before, pipeline.scheduler.sigmas[step].expand(1), conditions)
        assert torch.equal(packed(velocity), output[:, :tokens].float())


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["2509", "2511"])
def test_sources_with_timestep_0_are_the_pipelines_bit_for_bit(
    tmp_path: Path, sampling: LatentSamplingConfig, zero_cond_t: bool
) -> None:
    tiny.write_edit_plus(tmp_path, seed=1, zero_cond_t=zero_cond_t)
    model = edit.build_plus(QwenImageEditPlusConfig(path=str(tmp_path), **AREAS), device="cpu")
    asked = dataclasses.replace(sampling, num_inference_steps=3)
    sources = tiny.media_plus(tmp_path, number=0)
    x = initial(model, asked, rows=1)
    own = Editor(name="edit-plus", folder=tmp_path, model=model, pipeline=None, sources=tiny.media_plus)
    _, calls = run_pipeline(own.pipeline_of(model), x, asked, PROMPTS[0], sources)
    assert_given_as_by_the_pipeline(model, x, asked, inputs_of([sources], PROMPTS[:1]), calls[0])
    assert model.trainable.zero_cond_t is zero_cond_t


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("size", [(32, 48), (384, 512)])
def test_the_schedule_is_the_pipelines_whatever_the_sources(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path, size: tuple[int, int]
) -> None:
    height, width = size
    asked = dataclasses.replace(sampling, num_inference_steps=4, height=height, width=width)
    x = initial(editor.model, asked, rows=1)
    run_pipeline(editor.pipeline, x, asked, PROMPTS[0], editor.sources(tmp_path, number=0))
    result = editor.model.schedule(asked)
    torch.testing.assert_close(result, editor.pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [(32, 48), (64, 32)])
def test_final_latents_and_images_without_noise_are_the_pipelines(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path, scale: float, size: tuple[int, int]
) -> None:
    """Three rows with other prompts and sources in one batch, where the pipeline runs one by one."""
    height, width = size
    asked = dataclasses.replace(sampling, height=height, width=width, guidance_scale=scale)
    x = initial(editor.model, asked)
    sources = [editor.sources(tmp_path, number=number) for number in range(3)]
    result = sample(editor.model, x, asked, inputs_of(sources))
    with torch.no_grad():
        decoded = editor.model.decode(result)
    assert decoded.shape == (3, 3, height, width)
    for row, prompt in enumerate(PROMPTS):
        own = x[row : row + 1]
        latents, calls = run_pipeline(editor.pipeline, own, asked, prompt, sources[row])
        images, _ = run_pipeline(editor.pipeline, own, asked, prompt, sources[row], output="pt")
        assert len(calls) == asked.num_inference_steps * (1 if scale == 1 else 2)
        torch.testing.assert_close(packed(result[row : row + 1]), latents, rtol=0, atol=LATENT_TOLERANCE)
        torch.testing.assert_close(decoded[row : row + 1], images, rtol=0, atol=LATENT_TOLERANCE)


def test_another_source_moves_the_image_and_leaves_the_other_rows_alone(
    editor: Editor, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    sources = [editor.sources(tmp_path, number=number) for number in range(4)]
    x = initial(editor.model, sampling)
    before = sample(editor.model, x, sampling, inputs_of(sources[:3]))
    after = sample(editor.model, x, sampling, inputs_of([sources[3], *sources[1:3]]))
    moved = (after - before).flatten(1).abs().max(dim=1).values
    assert moved[0] > 1e-2
    assert moved[1:].max() < LATENT_TOLERANCE


def test_swapped_sources_change_the_velocities(plus: Editor, sampling: LatentSamplingConfig, tmp_path: Path) -> None:
    """Sources of one size, too, where only their order in the text and their positions tell them apart."""
    first, second = plus.sources(tmp_path, number=0)
    Image.open(first.uri).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "same-size.png")
    same_size = dataclasses.replace(first, uri=str(tmp_path / "same-size.png"))
    x = initial(plus.model, sampling, rows=1)
    for one, other in ((first, second), (first, same_size)):
        with torch.no_grad():
            ordered, swapped = (
                plus.model.velocity(
                    x, torch.tensor([0.7]), plus.model.encode(inputs_of([own], PROMPTS[:1]), sampling=sampling)
                )
                for own in ((one, other), (other, one))
            )
        assert float((ordered - swapped).abs().max()) > 1e-2
