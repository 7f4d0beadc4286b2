"""The models from a first frame against diffusers' WanImageToVideoPipeline, with Euler steps in place of UniPC."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan.model import WanFirstFrame
from wan_models import FROM_FRAME, built, write
from wan_pipelines import (
    GUIDED,
    LATENT_TOLERANCE,
    PLAIN,
    PROMPTS,
    SCALES,
    SIGMA_TOLERANCE,
    SIZES,
    frames_of,
    initial,
    negative,
    pipeline_of,
    run_pipeline,
    sample,
)

pytestmark = pytest.mark.slow

ModelOf = Callable[[str], Any]
each_model = pytest.mark.parametrize("name", FROM_FRAME)


@pytest.fixture
def sampling(frame_sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    return frame_sampling


@pytest.fixture
def model(model_of: ModelOf) -> Any:
    return model_of("wan21-i2v")


def sized(sampling: LatentSamplingConfig, size: tuple[int, int, int], **settings: Any) -> LatentSamplingConfig:
    frames, height, width = size
    return dataclasses.replace(sampling, frames=frames, height=height, width=width, **settings)


def assert_given_as_by_the_pipeline(
    model: WanFirstFrame, sampling: LatentSamplingConfig, inputs: Inputs, *, x: Tensor | None = None
) -> Tensor:
    """Conditions and velocities of all branches and steps of one row. Returns the final latents."""
    x = initial(model, sampling, rows=1) if x is None else x
    result, calls = run_pipeline(pipeline_of(model), x, sampling, inputs)
    branches = [inputs, negative(inputs)] if sampling.is_guided else [inputs]
    per_expert = sampling.num_inference_steps * len(branches) // len(model.experts)
    # The shift of 3 puts four steps at 1, 0.9, 0.75 and 0.5, so that each of two experts has two.
    assert [called for called, _, _ in calls] == [expert for expert in model.experts for _ in range(per_expert)]
    conditions = [model.encode(branch, sampling=sampling) for branch in branches]
    channels = x.shape[1]
    for number, (_, given, output) in enumerate(calls):
        own, dtype = conditions[number % len(branches)], given["hidden_states"].dtype
        assert torch.equal(given["hidden_states"][:, channels:], own["source"].to(dtype))
        assert torch.equal(given["encoder_hidden_states"], own["prompt_embeds"])
        features = given["encoder_hidden_states_image"]
        assert (features is None) is ("image_embeds" not in own)
        assert features is None or torch.equal(features, own["image_embeds"].to(dtype))
        noise = given["hidden_states"][:, :channels]
        with torch.no_grad():
            velocity = model.velocity(noise.float(), given["timestep"] / 1000, own)
        assert velocity.dtype is torch.float32
        if number < len(branches):
            assert torch.equal(noise, x.to(dtype))
            assert torch.equal(velocity, output.float())
        elif dtype is torch.float32:
            # Not bit for bit: 1000 (t / 1000) is not t, by a spacing of fp32 numbers.
            torch.testing.assert_close(velocity, output, rtol=0, atol=LATENT_TOLERANCE)
    return result


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_conditions_and_velocities_are_the_pipelines_bit_for_bit(
    model: WanFirstFrame, sampling: LatentSamplingConfig, tmp_path: Path, size: tuple[int, int, int], number: int
) -> None:
    """Both branches, with frames of three sizes and ratios, each scaled to those of the video."""
    asked = sized(sampling, size, num_inference_steps=2, **GUIDED)
    inputs = frames_of(tmp_path, [number], PROMPTS[:1], height=asked.height, width=asked.width)
    assert_given_as_by_the_pipeline(model, asked, inputs)


def test_velocities_are_the_pipelines_bit_for_bit_in_16_bits_too(
    tiny: Callable[[str], Path], sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    """There it rounds latents, frame, text and features, and so does the model; the VAE stays in fp32, as published."""
    model = built("wan21-i2v", tiny("wan21-i2v"), dtype="bfloat16", text_dtype="bfloat16")
    asked = dataclasses.replace(sampling, num_inference_steps=2, **GUIDED)
    assert_given_as_by_the_pipeline(model, asked, frames_of(tmp_path, [1], PROMPTS[:1]))


def test_a_checkpoint_without_an_image_encoder_is_the_pipelines_at_any_length_of_prompts(
    tmp_path: Path, sampling: LatentSamplingConfig
) -> None:
    write("wan21-i2v", tmp_path / "checkpoint", image_encoder=False)
    model = built("wan21-i2v", tmp_path / "checkpoint")
    asked = dataclasses.replace(sampling, num_inference_steps=2, max_sequence_length=48, **GUIDED)
    assert_given_as_by_the_pipeline(model, asked, frames_of(tmp_path, [0], PROMPTS[:1]))


@pytest.mark.parametrize("named", ["CLIPProcessor", "CLIPImageProcessor"])
def test_both_names_of_the_processor_that_are_published_give_the_same_features(
    tiny: Callable[[str], Path], model: WanFirstFrame, sampling: LatentSamplingConfig, tmp_path: Path, named: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny("wan21-i2v"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "image_processor": ["transformers", named]}))
    inputs = frames_of(tmp_path, [1, 2])
    models = (built("wan21-i2v", folder), model)
    features, expected = (one.encode(inputs, sampling=sampling)["image_embeds"] for one in models)
    # Convolutions whose weights lie elsewhere, features of order 1.
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [5, 9])
def test_the_condition_is_a_mask_and_latents_of_the_frame_before_grey_ones(
    model: WanFirstFrame, sampling: LatentSamplingConfig, tmp_path: Path, frames: int
) -> None:
    """By the formula: a pixel of 0 is grey in [-1, 1], and the mask has a channel for each frame of a latent one."""
    asked = sized(sampling, (frames, 32, 32))
    inputs = frames_of(tmp_path, [0], PROMPTS[:1], height=32, width=32)
    source = model.encode(inputs, sampling=asked)["source"]
    mask, latents = source[:, :4], source[:, 4:]
    assert bool((mask[:, :, 0] == 1).all()) and bool((mask[:, :, 1:] == 0).all())
    # Frame 0 has the size of the video already.
    pixels = torch.from_numpy(np.asarray(Image.open(inputs.media[0][0].uri)).copy()).permute(2, 0, 1).float()
    video = torch.zeros(1, 3, frames, 32, 32)
    video[0, :, 0] = 2 * pixels / 255 - 1
    settings = model.vae.config
    mean, std = (torch.tensor(settings[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        expected = (model.vae.encode(video).latent_dist.mode() - mean) / std
    # A division in place of a product with the inverse: spacings of fp32 numbers of order 1.
    torch.testing.assert_close(latents, expected, rtol=0, atol=2e-6)


def test_the_schedule_is_the_shifted_grid_and_the_pipelines(
    model: WanFirstFrame, sampling: LatentSamplingConfig
) -> None:
    """3 t / (1 + 2 t) of t = 1 - i / T."""
    result = model.schedule(sampling)
    assert torch.equal(result, torch.tensor([3 * t / (1 + 2 * t) for t in (1, 0.75, 0.5, 0.25, 0)]))
    scheduler = pipeline_of(model).scheduler
    scheduler.set_timesteps(4)
    torch.testing.assert_close(result, scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


CASES = {
    "one-plain": ("wan21-i2v", PLAIN),
    "one-batched": ("wan21-i2v", {**GUIDED, "guidance_mode": "batched"}),
    "one-two-pass": ("wan21-i2v", GUIDED),
    "two-plain": ("wan22-i2v", PLAIN),
    "two-two-pass": ("wan22-i2v", GUIDED),
    "two-scales": ("wan22-i2v", SCALES),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("name", "guidance"), CASES.values(), ids=CASES)
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    model_of: ModelOf,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    size: tuple[int, int, int],
    name: str,
    guidance: dict[str, Any],
) -> None:
    """Two rows in one batch, where the pipeline takes one; conditions and velocities on the way."""
    asked = sized(sampling, size, **guidance)
    model = model_of(name)
    inputs, x = frames_of(tmp_path, [1, 2], height=asked.height, width=asked.width), initial(model, asked)
    result = sample(model, x, asked, inputs)
    with torch.no_grad():
        decoded = model.decode(result)
    assert decoded.shape == (2, asked.frames, 3, asked.height, asked.width)
    assert float(decoded.std()) > 0.01
    for row in range(2):
        own, given = x[[row]], inputs.select([row])
        latents = assert_given_as_by_the_pipeline(model, asked, given, x=own)
        videos, _ = run_pipeline(pipeline_of(model), own, asked, given, output="pt")
        torch.testing.assert_close(result[[row]], latents, rtol=0, atol=LATENT_TOLERANCE)
        torch.testing.assert_close(decoded[[row]], videos, rtol=0, atol=LATENT_TOLERANCE)


def inverted(given: dict[str, Tensor]) -> dict[str, Tensor]:
    x, mask, frame = given["hidden_states"].split([4, 4, 4], dim=1)
    return {**given, "hidden_states": torch.cat([x, 1 - mask, frame], dim=1)}


def at_the_end(given: dict[str, Tensor]) -> dict[str, Tensor]:
    x, mask, frame = given["hidden_states"].split([4, 4, 4], dim=1)
    return {**given, "hidden_states": torch.cat([x, mask.flip(2), frame], dim=1)}


def frame_before_mask(given: dict[str, Tensor]) -> dict[str, Tensor]:
    x, mask, frame = given["hidden_states"].split([4, 4, 4], dim=1)
    return {**given, "hidden_states": torch.cat([x, frame, mask], dim=1)}


def condition_before_noise(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**given, "hidden_states": given["hidden_states"].roll(8, dims=1)}


def without_features(given: dict[str, Tensor]) -> dict[str, Tensor]:
    features = given["encoder_hidden_states_image"]
    return {**given, "encoder_hidden_states_image": torch.zeros_like(features)}


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        *(("wan21-i2v", mutant) for mutant in (inverted, at_the_end, condition_before_noise, without_features)),
        *((name, frame_before_mask) for name in FROM_FRAME),
    ],
)
def test_a_wrong_mask_order_or_feature_is_far_from_the_pipeline(
    model_of: ModelOf,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutant: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    model = model_of(name)
    inputs, x = frames_of(tmp_path, [1, 2]), initial(model, sampling)
    rows = [run_pipeline(pipeline_of(model), x[[row]], sampling, inputs.select([row]))[0] for row in range(2)]
    right = WanFirstFrame.arguments
    monkeypatch.setattr(WanFirstFrame, "arguments", lambda self, x, conditions: mutant(right(self, x, conditions)))
    result = sample(model, x, sampling, inputs)
    assert bool(((result - torch.cat(rows)).flatten(1).abs().amax(dim=1) > 100 * LATENT_TOLERANCE).all())


@each_model
def test_another_frame_moves_its_video_and_leaves_the_other_rows_alone(
    model_of: ModelOf, sampling: LatentSamplingConfig, tmp_path: Path, name: str
) -> None:
    model = model_of(name)
    x = initial(model, sampling)
    before, after = (sample(model, x, sampling, frames_of(tmp_path, numbers)) for numbers in ([0, 1], [3, 1]))
    moved = (after - before).flatten(1).abs().max(dim=1).values
    assert moved[0] > 1e-2
    assert moved[1] < LATENT_TOLERANCE
