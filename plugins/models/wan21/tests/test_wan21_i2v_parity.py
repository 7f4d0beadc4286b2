"""The model from a first frame against diffusers' WanImageToVideoPipeline, with Euler steps in place of UniPC."""

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
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan21 import i2v, tiny
from unirl.models.wan21.config import Wan21I2VConfig
from unirl.models.wan21.i2v import Wan21I2VModel
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame
from wan_first_frames import NEGATIVE, PROMPTS, frames_of, initial, pipeline_of, run_pipeline, sample

SIZES = [(5, 32, 64), (9, 48, 32)]
# The schedulers of diffusers shift in fp32, ours in fp64: two spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 1.2e-7
# Four or eight forwards of fp32 arithmetic at another batch size, from sigmas that differ in their last bit, of latents
# of order 1.
LATENT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pipeline(i2v_model: Wan21I2VModel) -> WanImageToVideoPipeline:
    return pipeline_of(i2v_model, EulerScheduler(shift=3.0))


@pytest.fixture
def sampling(sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    return dataclasses.replace(sampling, max_sequence_length=512)


def sized(sampling: LatentSamplingConfig, size: tuple[int, int, int], **settings: Any) -> LatentSamplingConfig:
    frames, height, width = size
    return dataclasses.replace(sampling, frames=frames, height=height, width=width, **settings)


def assert_given_as_by_the_pipeline(
    model: WanFirstFrame, pipeline: WanImageToVideoPipeline, sampling: LatentSamplingConfig, folder: Path, number: int
) -> None:
    """Conditions and the velocity of both branches at the first step, bit for bit."""
    inputs = frames_of(folder, [number], PROMPTS[:1], height=sampling.height, width=sampling.width)
    x = initial(model, sampling, rows=1)
    _, calls = run_pipeline(pipeline, x, sampling, PROMPTS[0], inputs.media[0])
    branches = (inputs, inputs.negative(NEGATIVE))
    assert len(calls) == sampling.num_inference_steps * len(branches)
    for branch, (_, given, output) in zip(branches, calls, strict=False):
        conditions = model.encode(branch, sampling=sampling)
        dtype, channels = given["hidden_states"].dtype, x.shape[1]
        assert torch.equal(given["hidden_states"][:, :channels], x.to(dtype))
        assert torch.equal(given["hidden_states"][:, channels:], conditions["source"].to(dtype))
        assert torch.equal(given["encoder_hidden_states"], conditions["prompt_embeds"])
        features = given["encoder_hidden_states_image"]
        if features is None:
            assert "image_embeds" not in conditions
        else:
            assert torch.equal(features, conditions["image_embeds"].to(dtype))
        with torch.no_grad():
            velocity = model.velocity(x, torch.ones(1), conditions)
        assert velocity.dtype is torch.float32
        assert torch.equal(velocity, output.float())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_conditions_and_velocities_are_the_pipelines_bit_for_bit(
    i2v_model: Wan21I2VModel,
    pipeline: WanImageToVideoPipeline,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    size: tuple[int, int, int],
    number: int,
) -> None:
    """Of both branches, with frames of three sizes and ratios, each scaled to those of the video."""
    asked = sized(sampling, size, num_inference_steps=2, guidance_scale=4.0)
    assert_given_as_by_the_pipeline(i2v_model, pipeline, asked, tmp_path, number)


def test_velocities_are_the_pipelines_bit_for_bit_in_16_bits_too(
    i2v_folder: Path, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    """There it rounds latents, frame, text and features, and so does the model; the VAE stays in fp32, as published."""
    model = i2v.build(Wan21I2VConfig(path=str(i2v_folder), dtype="bfloat16", text_dtype="bfloat16"), device="cpu")
    asked = dataclasses.replace(sampling, num_inference_steps=2, guidance_scale=4.0)
    assert_given_as_by_the_pipeline(model, pipeline_of(model, EulerScheduler(shift=3.0)), asked, tmp_path, 1)


def test_a_checkpoint_without_an_image_encoder_is_the_pipelines_at_any_length_of_prompts(
    tmp_path: Path, sampling: LatentSamplingConfig
) -> None:
    tiny.write_i2v(tmp_path / "checkpoint", seed=1, image_encoder=False)
    model = i2v.build(Wan21I2VConfig(path=str(tmp_path / "checkpoint")), device="cpu")
    asked = dataclasses.replace(sampling, num_inference_steps=2, guidance_scale=4.0, max_sequence_length=48)
    assert_given_as_by_the_pipeline(model, pipeline_of(model, EulerScheduler(shift=3.0)), asked, tmp_path, 0)


@pytest.mark.parametrize("named", ["CLIPProcessor", "CLIPImageProcessor"])
def test_both_names_of_the_processor_that_are_published_give_the_same_features(
    i2v_folder: Path, i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path, named: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(i2v_folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "image_processor": ["transformers", named]}))
    model = i2v.build(Wan21I2VConfig(path=str(folder)), device="cpu")
    inputs = frames_of(tmp_path, [1, 2])
    features, expected = (one.encode(inputs, sampling=sampling)["image_embeds"] for one in (model, i2v_model))
    # Convolutions whose weights lie elsewhere, features of order 1.
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [5, 9])
def test_the_condition_is_a_mask_and_latents_of_the_frame_before_grey_ones(
    i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path, frames: int
) -> None:
    """By the formula: a pixel of 0 is grey in [-1, 1], and the mask has a channel for each frame of a latent one."""
    asked = sized(sampling, (frames, 32, 32))
    inputs = frames_of(tmp_path, [0], PROMPTS[:1], height=32, width=32)
    source = i2v_model.encode(inputs, sampling=asked)["source"]
    mask, latents = source[:, :4], source[:, 4:]
    assert bool((mask[:, :, 0] == 1).all()) and bool((mask[:, :, 1:] == 0).all())
    # Frame 0 has the size of the video already.
    pixels = torch.from_numpy(np.asarray(Image.open(inputs.media[0][0].uri)).copy()).permute(2, 0, 1).float()
    video = torch.zeros(1, 3, frames, 32, 32)
    video[0, :, 0] = 2 * pixels / 255 - 1
    settings = i2v_model.vae.config
    mean, std = (torch.tensor(settings[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        expected = (i2v_model.vae.encode(video).latent_dist.mode() - mean) / std
    # A division in place of a product with the inverse: spacings of fp32 numbers of order 1.
    torch.testing.assert_close(latents, expected, rtol=0, atol=2e-6)


def test_the_schedule_is_the_shifted_grid_and_the_pipelines(
    i2v_model: Wan21I2VModel, pipeline: WanImageToVideoPipeline, sampling: LatentSamplingConfig
) -> None:
    """3 t / (1 + 2 t) of t = 1 - i / T."""
    result = i2v_model.schedule(sampling)
    assert torch.equal(result, torch.tensor([3 * t / (1 + 2 * t) for t in (1, 0.75, 0.5, 0.25, 0)]))
    pipeline.scheduler.set_timesteps(4)
    torch.testing.assert_close(result, pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


def distances(
    model: Wan21I2VModel, pipeline: WanImageToVideoPipeline, sampling: LatentSamplingConfig, folder: Path
) -> tuple[float, float]:
    """How far final latents and videos of two rows in one batch are from the pipeline's, row by row."""
    inputs = frames_of(folder, [1, 2], height=sampling.height, width=sampling.width)
    x = initial(model, sampling)
    result = sample(model, x, sampling, inputs)
    with torch.no_grad():
        decoded = model.decode(result)
    assert decoded.shape == (2, sampling.frames, 3, sampling.height, sampling.width)
    assert float(decoded.std()) > 0.01
    both: list[Tensor] = []
    for output in ("latent", "pt"):
        rows = [
            run_pipeline(pipeline, x[row : row + 1], sampling, text, inputs.media[row], output=output)[0]
            for row, text in enumerate(PROMPTS)
        ]
        both.append(torch.cat(rows))
    return float((result - both[0]).abs().max()), float((decoded - both[1]).abs().max())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("scale", "mode"), [(1.0, "batched"), (4.0, "batched"), (4.0, "two-pass")])
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    i2v_model: Wan21I2VModel,
    pipeline: WanImageToVideoPipeline,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    size: tuple[int, int, int],
    scale: float,
    mode: str,
) -> None:
    asked = sized(sampling, size, guidance_scale=scale, guidance_mode=mode)
    assert max(distances(i2v_model, pipeline, asked, tmp_path)) <= LATENT_TOLERANCE


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


@pytest.mark.parametrize("mutant", [inverted, at_the_end, frame_before_mask, condition_before_noise, without_features])
def test_a_wrong_mask_order_or_feature_is_far_from_the_pipeline(
    i2v_model: Wan21I2VModel,
    pipeline: WanImageToVideoPipeline,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    right = WanFirstFrame.arguments
    monkeypatch.setattr(WanFirstFrame, "arguments", lambda self, x, conditions: mutant(right(self, x, conditions)))
    assert distances(i2v_model, pipeline, sampling, tmp_path)[0] > 100 * LATENT_TOLERANCE


def test_another_frame_moves_its_video_and_leaves_the_other_rows_alone(
    i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    x = initial(i2v_model, sampling)
    before, after = (sample(i2v_model, x, sampling, frames_of(tmp_path, numbers)) for numbers in ([0, 1], [3, 1]))
    moved = (after - before).flatten(1).abs().max(dim=1).values
    assert moved[0] > 1e-2
    assert moved[1] < LATENT_TOLERANCE
