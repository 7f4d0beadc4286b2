"""The model against diffusers' HunyuanVideoPipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_diffusers import assert_weights_are_those_of, final_latents, initial_latents
from diffusers import HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video import parity
from unirl.models.hunyuan_video.config import HunyuanVideoConfig
from unirl.models.hunyuan_video.model import HunyuanVideoModel, build

Pipelines = Callable[[HunyuanVideoModel], Any]

PROMPTS = ["a red ring rolls to the left", "a dog"]
SIZES = [(5, 32, 64), (9, 48, 32)]
# The scheduler of diffusers shifts in fp32, ours in fp64: two spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 1.2e-7
# One forward of fp32 arithmetic with fewer masked tokens, and so in another order, of velocities of order 1.
VELOCITY_TOLERANCE = 2e-6
# Four such forwards, from sigmas that differ in their last bit, of latents of order 1.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def sample(model: HunyuanVideoModel, x: Tensor, sampling: LatentSamplingConfig) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(model, x, sampling, {"positive": Inputs.of_texts(PROMPTS)})


def test_the_weights_are_those_that_diffusers_loads(model: HunyuanVideoModel, tiny_folder: Path) -> None:
    assert_weights_are_those_of(HunyuanVideoPipeline, tiny_folder, model.pipeline.components)


def test_prompts_stand_in_the_template_and_lose_its_95_tokens(
    model: HunyuanVideoModel, sampling: LatentSamplingConfig
) -> None:
    """The template as text, and states of transformers before the last two of four layers."""
    header = (
        "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
        "1. The main content and theme of the video."
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "4. background environment, light, style and atmosphere."
        "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
    )
    encoder, tokenizer = model.pipeline.text_encoder, model.pipeline.tokenizer
    assert len(tokenizer(header)["input_ids"]) == 95
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    for row, text in enumerate(PROMPTS):
        tokens = tokenizer(f"{header}{text}<|eot_id|>", return_tensors="pt")
        states: list[Tensor] = []
        handle = encoder.layers[1].register_forward_hook(lambda _m, _a, out, kept=states: kept.append(out))
        with torch.no_grad():
            encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        handle.remove()
        expected = states[0][0, 95:]
        mask = conditions["prompt_mask"][row]
        assert int(mask.sum()) == len(expected) > 1
        # The same sums without padding, in another order.
        torch.testing.assert_close(conditions["prompt_embeds"][row, mask], expected, rtol=1e-5, atol=1e-5)


def test_the_pooled_text_is_that_of_clip_without_the_template(
    model: HunyuanVideoModel, sampling: LatentSamplingConfig
) -> None:
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    for row, text in enumerate(PROMPTS):
        tokens = model.pipeline.tokenizer_2(text, return_tensors="pt")
        with torch.no_grad():
            expected = model.pipeline.text_encoder_2(tokens.input_ids).pooler_output[0]
        # The same sums without padding, in another order.
        torch.testing.assert_close(conditions["pooled"][row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_schedule_is_the_shifted_grid_and_that_of_the_pipeline(
    model: HunyuanVideoModel, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, steps: int
) -> None:
    """7 t / (1 + 6 t) of t = 1 - i / T."""
    asked = dataclasses.replace(sampling, num_inference_steps=steps)
    grid = [1.0 - step / steps for step in range(steps + 1)]
    result = model.schedule(asked)
    assert torch.equal(result, torch.tensor([7 * t / (1 + 6 * t) for t in grid]))
    pipeline = on_the_same_weights(model)
    parity.call(pipeline, PROMPTS, asked, initial(model, asked))
    torch.testing.assert_close(result, pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [6.0, 1.3])
def test_conditions_and_velocities_are_the_pipelines_at_every_step(
    tiny_folder: Path, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, dtype: str, scale: float
) -> None:
    """Conditions bit for bit; in 16 bits the pipeline rounds latents and texts, and so does the model. From its second
    step on it rounds timesteps as well, which the model does not."""
    model = build(HunyuanVideoConfig(path=str(tiny_folder), dtype=dtype, text_dtype=dtype), device="cpu")
    pipeline = on_the_same_weights(model)
    num_steps = 4 if dtype == "float32" else 1
    asked = dataclasses.replace(sampling, num_inference_steps=num_steps, options={"embedded_guidance": scale})
    calls: list[tuple[Mapping[str, Tensor], Tensor]] = []
    pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    parity.call(pipeline, PROMPTS, asked, initial(model, asked))
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=asked)
    assert len(calls) == num_steps
    for step, (given, expected) in enumerate(list(calls)):
        assert torch.equal(conditions["prompt_embeds"], given["encoder_hidden_states"])
        assert torch.equal(conditions["prompt_mask"], given["encoder_attention_mask"].bool())
        assert torch.equal(conditions["pooled"], given["pooled_projections"])
        with torch.no_grad():
            result = model.velocity(
                given["hidden_states"].float(), pipeline.scheduler.sigmas[step].expand(len(PROMPTS)), conditions
            )
        assert torch.equal(calls[-1][0]["guidance"], given["guidance"])
        assert calls[-1][0]["timestep"].dtype is given["timestep"].dtype is torch.float32
        assert result.dtype is torch.float32
        # 16 bits: a few roundings of 2^-9 of values up to 4.
        tolerance = VELOCITY_TOLERANCE if dtype == "float32" else 4e-2
        torch.testing.assert_close(result, expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scale", [6.0, 1.0])
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    model: HunyuanVideoModel,
    on_the_same_weights: Pipelines,
    sampling: LatentSamplingConfig,
    size: tuple[int, int, int],
    scale: float,
) -> None:
    """The whole way: two embedded scales, two sizes, two numbers of frames, prompts of different lengths."""
    frames, height, width = size
    asked = dataclasses.replace(
        sampling, frames=frames, height=height, width=width, options={"embedded_guidance": scale}
    )
    x = initial(model, asked)
    latents, videos = parity.call(on_the_same_weights(model), PROMPTS, asked, x)
    result = sample(model, x, asked)
    with torch.no_grad():
        decoded = model.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == videos.shape == (len(PROMPTS), frames, 3, height, width)
    torch.testing.assert_close(decoded, videos, rtol=0, atol=LATENT_TOLERANCE)
    assert float(decoded.std()) > 0.01


def _wrong_layer(model: HunyuanVideoModel) -> dict[str, Any]:
    """States after the last layer."""
    own = model.pipeline._get_llama_prompt_embeds
    return {"_get_llama_prompt_embeds": partial(own, num_hidden_layers_to_skip=0)}


def _wrong_crop(model: HunyuanVideoModel) -> dict[str, Any]:
    own = model.pipeline.encode_prompt
    return {"encode_prompt": partial(own, prompt_template={**DEFAULT_PROMPT_TEMPLATE, "crop_start": 96})}


def _wrong_template(model: HunyuanVideoModel) -> dict[str, Any]:
    """A template of as many tokens."""
    template = str(DEFAULT_PROMPT_TEMPLATE["template"]).replace("Describe the video", "Describe the text")
    return {
        "encode_prompt": partial(model.pipeline.encode_prompt, prompt_template={"template": template, "crop_start": 95})
    }


@pytest.mark.parametrize("mutant", [_wrong_layer, _wrong_crop, _wrong_template])
def test_the_comparison_of_final_latents_sees_a_wrong_condition(
    model: HunyuanVideoModel,
    tiny_folder: Path,
    sampling: LatentSamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[HunyuanVideoModel], dict[str, Any]],
) -> None:
    """Each of these is more than a hundred tolerances away."""
    x = initial(model, sampling)
    expected = parity.run(tiny_folder, prompts=PROMPTS, sampling=sampling, initial=x).final
    torch.testing.assert_close(sample(model, x, sampling), expected, rtol=0, atol=LATENT_TOLERANCE)
    for name, value in mutant(model).items():
        monkeypatch.setattr(model.pipeline, name, value)
    result = sample(model, x, sampling)
    assert float((result - expected).abs().max()) > 100 * LATENT_TOLERANCE


@pytest.mark.parametrize("name", ["guidance", "timestep"])
def test_the_comparison_of_final_latents_sees_a_wrong_scale(
    model: HunyuanVideoModel, tiny_folder: Path, sampling: LatentSamplingConfig, name: str
) -> None:
    """Guidance and timesteps that are not multiplied by 1000."""
    x = initial(model, sampling)
    expected = parity.run(tiny_folder, prompts=PROMPTS, sampling=sampling, initial=x).final
    handle = model.trainable.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, {**kwargs, name: kwargs[name] / 1000.0}), with_kwargs=True
    )
    result = sample(model, x, sampling)
    handle.remove()
    assert float((result - expected).abs().max()) > 100 * LATENT_TOLERANCE
