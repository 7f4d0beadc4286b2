"""The models against diffusers' HunyuanVideo15Pipeline and HunyuanVideo15ImageToVideoPipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_diffusers import assert_weights_are_those_of, final_latents, initial_latents
from diffusers import HunyuanVideo15Pipeline
from PIL import Image
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video15 import model as of_texts
from unirl.models.hunyuan_video15 import parity, tiny
from unirl.models.hunyuan_video15.config import HunyuanVideo15Config
from unirl.models.hunyuan_video15.image import HunyuanVideo15ImageModel
from unirl.models.hunyuan_video15.model import HunyuanVideo15Model

pytestmark = pytest.mark.slow

Pipelines = Callable[[HunyuanVideo15Model], Any]

PROMPTS = ['a sign that says "STOP" and “go”', "a dog"]
NEGATIVE = "blurry"
SIZES = [(5, 32, 64), (9, 48, 32)]
# The scheduler of diffusers shifts in fp32, ours in fp64: two spacings of fp32 numbers just below 1.
SIGMA_TOLERANCE = 1.2e-7
# One forward of fp32 arithmetic with fewer masked tokens, and so in another order, of velocities of order 1.
VELOCITY_TOLERANCE = 2e-6
# Four or eight such forwards, from sigmas that differ in their last bit, of latents of order 1.
LATENT_TOLERANCE = 1e-5

initial = partial(initial_latents, rows=len(PROMPTS))


def inputs_of(sources: Sequence[tuple[MediaRef, ...]]) -> Inputs:
    ids = tuple(map(str, range(len(PROMPTS))))
    return Inputs(ids=ids, prompts=tuple(PROMPTS), texts=tuple(PROMPTS), media=tuple(sources))


@pytest.fixture
def sources(tmp_path: Path) -> list[tuple[MediaRef, ...]]:
    return [tiny.media(tmp_path, number=number) for number in (1, 2)]


def recorded(pipeline: Any, run: Callable[[], Any]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Arguments and output of its transformer at each call."""
    calls: list[tuple[dict[str, Tensor], Tensor]] = []
    handle = pipeline.transformer.register_forward_hook(
        lambda _module, _args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    try:
        run()
    finally:
        handle.remove()
    return calls


def sample(model: HunyuanVideo15Model, x: Tensor, sampling: LatentSamplingConfig, inputs: Inputs) -> Tensor:
    """Final latents of the shared sampler without noise."""
    return final_latents(model, x, sampling, {"positive": inputs, "negative": inputs.negative(NEGATIVE)})


def test_the_weights_are_those_that_diffusers_loads(of_text: HunyuanVideo15Model, tiny_folder: Path) -> None:
    assert_weights_are_those_of(HunyuanVideo15Pipeline, tiny_folder, of_text.pipeline.components)


def test_prompts_stand_in_the_template_byte_for_byte_and_lose_its_108_tokens(
    of_text: HunyuanVideo15Model, sampling: LatentSamplingConfig
) -> None:
    """The template as text, with the indentation of its source, and states of transformers before the last two of four
    layers."""
    header = (
        "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the following aspects:"
        "         1. The main content and theme of the video."
        "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "         4. background environment, light, style and atmosphere."
        "         5. camera angles, movements, and transitions used in the video.<|im_end|>\n<|im_start|>user\n"
    )
    encoder, tokenizer = of_text.pipeline.text_encoder, of_text.pipeline.tokenizer
    assert len(tokenizer(header)["input_ids"]) == 108
    conditions = of_text.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    for row, text in enumerate(PROMPTS):
        tokens = tokenizer(f"{header}{text}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
        states: list[Tensor] = []
        handle = encoder.layers[1].register_forward_hook(lambda _m, _a, out, kept=states: kept.append(out))
        with torch.no_grad():
            encoder(**tokens)
        handle.remove()
        expected = states[0][0, 108:]
        mask = conditions["prompt_mask"][row]
        assert int(mask.sum()) == len(expected)
        # The same sums without padding, in another order.
        torch.testing.assert_close(conditions["prompt_embeds"][row, mask], expected, rtol=1e-5, atol=1e-5)


def test_glyphs_are_those_of_the_quoted_words_alone(
    of_text: HunyuanVideo15Model, sampling: LatentSamplingConfig
) -> None:
    conditions = of_text.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    tokens = of_text.pipeline.tokenizer_2('Text "STOP". Text "go". ', return_tensors="pt")
    with torch.no_grad():
        expected = of_text.pipeline.text_encoder_2(**tokens).last_hidden_state[0]
    mask = conditions["glyph_mask"]
    assert mask.shape == (2, 256)
    assert mask.sum(dim=1).tolist() == [len(expected), 0]
    # The same sums without padding, in another order.
    torch.testing.assert_close(conditions["glyph_embeds"][0, mask[0]], expected, rtol=1e-5, atol=1e-5)
    assert not conditions["glyph_embeds"][1].any()


def test_velocities_follow_every_condition_of_prompts_that_quote(
    of_image: HunyuanVideo15ImageModel, sampling: LatentSamplingConfig, sources: list[tuple[MediaRef, ...]]
) -> None:
    conditions = of_image.encode(inputs_of(sources), sampling=sampling)
    x, sigma = initial(of_image, sampling), torch.full((len(PROMPTS),), 0.7)
    with torch.no_grad():
        plain = of_image.velocity(x, sigma, conditions)
        for name, value in conditions.items():
            other = of_image.velocity(x, sigma, {**conditions, name: torch.as_tensor(value).flip(0)})
            # Glyphs of the second prompt, which has none, are masked.
            rows = [0] if name == "glyph_embeds" else [0, 1]
            assert all(float((other[row] - plain[row]).abs().max()) > 1e-4 for row in rows), name


@pytest.mark.parametrize("steps", [4, 20])
def test_the_schedule_is_the_shifted_grid_and_that_of_the_pipeline(
    of_text: HunyuanVideo15Model, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, steps: int
) -> None:
    """5 t / (1 + 4 t) of t = 1 - i / T."""
    asked = dataclasses.replace(sampling, num_inference_steps=steps)
    grid = [1.0 - step / steps for step in range(steps + 1)]
    result = of_text.schedule(asked)
    assert torch.equal(result, torch.tensor([5 * t / (1 + 4 * t) for t in grid]))
    pipeline = on_the_same_weights(of_text)
    parity.call(pipeline, PROMPTS, asked, initial(of_text, asked), height=asked.height, width=asked.width)
    torch.testing.assert_close(result, pipeline.scheduler.sigmas, rtol=0, atol=SIGMA_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conditions_and_velocities_are_the_pipelines_at_every_step(
    tiny_folder: Path, on_the_same_weights: Pipelines, sampling: LatentSamplingConfig, dtype: str
) -> None:
    """Conditions bit for bit; in 16 bits the pipeline rounds latents, texts and timesteps, and so does the model."""
    model = of_texts.build(HunyuanVideo15Config(path=str(tiny_folder), dtype=dtype, text_dtype=dtype), device="cpu")
    pipeline = on_the_same_weights(model)
    x, size = initial(model, sampling), {"height": sampling.height, "width": sampling.width}
    calls = recorded(pipeline, lambda: parity.call(pipeline, PROMPTS, sampling, x, **size))
    conditions = model.encode(Inputs.of_texts(PROMPTS), sampling=sampling)
    assert len(calls) == 4
    for step, (given, expected) in enumerate(calls):
        for key, name in (("", "prompt"), ("_2", "glyph")):
            assert torch.equal(conditions[f"{name}_embeds"], given[f"encoder_hidden_states{key}"])
            assert torch.equal(conditions[f"{name}_mask"], given[f"encoder_attention_mask{key}"].bool())
        assert given["image_embeds"].shape == (2, 729, 16) and not given["image_embeds"].any()
        with torch.no_grad():
            result = model.velocity(
                given["hidden_states"][:, :4].float(), pipeline.scheduler.sigmas[step].expand(len(PROMPTS)), conditions
            )
        assert result.dtype is torch.float32
        # 16 bits: a few roundings of 2^-9 of values up to 4.
        tolerance = VELOCITY_TOLERANCE if dtype == "float32" else 4e-2
        torch.testing.assert_close(result, expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("scale", "mode"), [(1.0, "batched"), (6.0, "batched"), (6.0, "two-pass")])
def test_final_latents_and_videos_without_noise_are_the_pipelines(
    of_text: HunyuanVideo15Model,
    on_the_same_weights: Pipelines,
    sampling: LatentSamplingConfig,
    size: tuple[int, int, int],
    scale: float,
    mode: str,
) -> None:
    """The whole way, with guidance too: two sizes, two numbers of frames, prompts of different lengths."""
    frames, height, width = size
    asked = dataclasses.replace(
        sampling,
        **{"frames": frames, "height": height, "width": width},
        **{"guidance_scale": scale, "guidance_mode": mode, "negative_prompt": NEGATIVE},
    )
    x = initial(of_text, asked)
    latents, videos = parity.call(on_the_same_weights(of_text), PROMPTS, asked, x, height=height, width=width)
    result = sample(of_text, x, asked, Inputs.of_texts(PROMPTS))
    with torch.no_grad():
        decoded = of_text.decode(result)
    torch.testing.assert_close(result, latents, rtol=0, atol=LATENT_TOLERANCE)
    assert decoded.shape == videos.shape == (len(PROMPTS), frames, 3, height, width)
    torch.testing.assert_close(decoded, videos, rtol=0, atol=LATENT_TOLERANCE)
    assert float(decoded.std()) > 0.01


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_videos_from_a_first_frame_are_the_pipelines(
    of_image: HunyuanVideo15ImageModel,
    on_the_same_weights: Pipelines,
    sampling: LatentSamplingConfig,
    sources: list[tuple[MediaRef, ...]],
    size: tuple[int, int, int],
    scale: float,
) -> None:
    """Conditions bit for bit, the first velocity, latents and videos, of images in two sizes."""
    frames, height, width = size
    asked = dataclasses.replace(
        sampling,
        **{"frames": frames, "height": height, "width": width},
        **{"guidance_scale": scale, "negative_prompt": NEGATIVE},
    )
    x, inputs = initial(of_image, asked), inputs_of(sources)
    pipeline = on_the_same_weights(of_image)
    conditions = of_image.encode(inputs, sampling=asked)
    with torch.no_grad():
        first = of_image.velocity(x, torch.ones(len(x)), conditions)
        result = sample(of_image, x, asked, inputs)
        decoded = of_image.decode(result)
    for row, text in enumerate(PROMPTS):
        ends: list[tuple[Tensor, Tensor]] = []
        given = Image.open(sources[row][0].uri)
        row_x = x[row : row + 1]
        calls = recorded(
            pipeline,
            lambda text=text, row_x=row_x, given=given, ends=ends: ends.append(
                parity.call(pipeline, [text], asked, row_x, image=given)
            ),
        )
        kwargs, expected = calls[0]
        assert torch.equal(conditions["image_embeds"][row], kwargs["image_embeds"][0])
        assert torch.equal(conditions["first_frame"][row, :, 0], kwargs["hidden_states"][0, 4:8, 0])
        known, mask = (part[row] for part in of_image.known(x, conditions))
        assert torch.equal(torch.cat([known, mask]), kwargs["hidden_states"][0, 4:])
        assert mask[0, 0].all() and not mask[0, 1:].any()
        torch.testing.assert_close(first[row], expected[0], rtol=0, atol=VELOCITY_TOLERANCE)
        latents, videos = ends[0]
        torch.testing.assert_close(result[row], latents[0], rtol=0, atol=LATENT_TOLERANCE)
        torch.testing.assert_close(decoded[row], videos[0], rtol=0, atol=LATENT_TOLERANCE)


def _wrong_layer(model: HunyuanVideo15Model) -> dict[str, Any]:
    """States after the last layer."""
    own = model.pipeline._get_mllm_prompt_embeds
    return {"_get_mllm_prompt_embeds": partial(own, num_hidden_layers_to_skip=0)}


def _wrong_crop(model: HunyuanVideo15Model) -> dict[str, Any]:
    return {"prompt_template_encode_start_idx": 109}


def _collapsed_template(model: HunyuanVideo15Model) -> dict[str, Any]:
    """The crop of the template, and not its bytes."""
    return {"system_message": " ".join(model.pipeline.system_message.split())}


def _glyphs_of_all_words(model: HunyuanVideo15Model) -> dict[str, Any]:
    own = model.pipeline._get_byt5_prompt_embeds

    def quoted(*, prompt: list[str], **settings: Any) -> Any:
        return own(prompt=[f'"{text}"' for text in prompt], **settings)

    return {"_get_byt5_prompt_embeds": quoted}


@pytest.mark.parametrize("mutant", [_wrong_layer, _wrong_crop, _collapsed_template, _glyphs_of_all_words])
def test_the_comparison_of_final_latents_sees_a_wrong_condition(
    of_text: HunyuanVideo15Model,
    tiny_folder: Path,
    sampling: LatentSamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[HunyuanVideo15Model], dict[str, Any]],
) -> None:
    """Each of these is more than a hundred tolerances away."""
    x = initial(of_text, sampling)
    expected = parity.run(tiny_folder, prompts=PROMPTS, sampling=sampling, initial=x).final
    inputs = Inputs.of_texts(PROMPTS)
    torch.testing.assert_close(sample(of_text, x, sampling, inputs), expected, rtol=0, atol=LATENT_TOLERANCE)
    for name, value in mutant(of_text).items():
        monkeypatch.setattr(of_text.pipeline, name, value)
    result = sample(of_text, x, sampling, inputs)
    assert float((result - expected).abs().max()) > 100 * LATENT_TOLERANCE
