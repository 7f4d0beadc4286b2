"""Scores against transformers' own pipelines, open_clip, the published ImageReward and the formulas of the papers."""

from __future__ import annotations

import json
import logging
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel, SiglipImageProcessorPil, SiglipModel
from unirl.core.roles import ScoreInput
from unirl.numerics.pixels import levels

Build = Callable[..., Any]
Samples = Callable[..., ScoreInput]
Noise = Callable[..., Tensor]
Tiny = Callable[[str], Mapping[str, Any]]

NAMES = ["aesthetic", "clipscore", "hpsv2", "image-reward", "pickscore", "siglip"]
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
"""fp32 through two small encoders, whose sums each side takes in its own order."""


def pipeline(name: str, folder: str, images: Tensor, prompts: list[str]) -> tuple[Any, Tensor, Tensor]:
    """Model and output of transformers for 8-bit images and prompts, and cosines by their definition."""
    is_siglip = name == "siglip"
    model: Any = (SiglipModel if is_siglip else CLIPModel).from_pretrained(folder)
    processor = (SiglipImageProcessorPil if is_siglip else CLIPImageProcessorPil).from_pretrained(folder)
    pictures = [Image.fromarray(np.uint8(image.permute(1, 2, 0).numpy() * 255 + 0.5)) for image in images]
    padding = {"padding": "max_length", "max_length": 24} if is_siglip else {"padding": True, "max_length": 24}
    words = AutoTokenizer.from_pretrained(folder)(prompts, truncation=True, return_tensors="pt", **padding)
    with torch.no_grad():
        out = model(
            input_ids=words["input_ids"],
            attention_mask=None if is_siglip else words["attention_mask"],
            pixel_values=processor(pictures, return_tensors="pt")["pixel_values"],
        )
    image, text = out.image_embeds.double(), out.text_embeds.double()
    cosine = (image * text).sum(1) / (image.norm(dim=1) * text.norm(dim=1))
    return model, out, cosine.float()


@pytest.mark.parametrize("name", ["clipscore", "pickscore", "siglip"])
def test_scores_are_those_of_transformers_on_images_of_the_encoders_size(
    build: Build, tiny: Tiny, samples: Samples, noise: Noise, name: str
) -> None:
    images, prompts = noise(4, 32, 32), ["a cat", "Two red kites", "x", "a" * 60]
    _, out, cosine = pipeline(name, tiny(name)["path"], images, prompts)
    scores = build(name).score(samples(images, prompts))
    logits = out.logits_per_image.diagonal()
    expected = {
        "clipscore": (cosine, 100 * cosine),
        "pickscore": (logits / 26, logits),
        "siglip": (cosine, logits),
    }[name]
    torch.testing.assert_close(scores.values, expected[0], **CLOSE)
    # Of a logit, 100 times as large.
    torch.testing.assert_close(scores.parts["raw"], expected[1], rtol=1e-5, atol=2e-3)
    if name == "siglip":
        torch.testing.assert_close(scores.parts["probability"], torch.sigmoid(logits), **CLOSE)


@pytest.mark.parametrize("name", ["clipscore", "siglip"])
def test_scores_of_resized_images_differ_by_what_8_bits_cost(
    build: Build, tiny: Tiny, samples: Samples, noise: Noise, name: str
) -> None:
    images, prompts = noise(4, 48, 70), ["a cat", "Two red kites", "x", "dusk"]
    _, _, cosine = pipeline(name, tiny(name)["path"], images, prompts)
    result = build(name).score(samples(images, prompts)).values
    # 3,072 inputs, each off by at most 1.2 / 255 and by a third of that on average, with signs that cancel: measured
    # 1e-3 for a cosine; another filter or a crop that is off by a pixel costs 0.05 and more.
    assert float((result - cosine).abs().max()) < 5e-3


def test_aesthetic_is_the_head_on_features_of_length_1(
    build: Build, tiny: Tiny, samples: Samples, noise: Noise
) -> None:
    images = noise(3, 32, 32)
    settings = tiny("aesthetic")
    _, out, _ = pipeline("aesthetic", settings["path"], images, ["x"] * 3)
    head = torch.load(settings["head"], weights_only=True)
    x = out.image_embeds.double()
    x = x / x.norm(dim=1, keepdim=True)
    for number in (0, 2, 4, 6, 7):
        x = x @ head[f"layers.{number}.weight"].double().T + head[f"layers.{number}.bias"].double()
    scores = build("aesthetic").score(samples(images))
    torch.testing.assert_close(scores.values, x[:, 0].float(), **CLOSE)
    assert torch.equal(scores.parts["raw"], scores.values)


GOLDEN: Mapping[str, Any] = runpy.run_path(str(Path(__file__).with_name("golden.py")))
EXPECTED: Mapping[str, list[float]] = json.loads(GOLDEN["GOLDEN"].read_text())


def with_closed_form(file: Path, *, inside: str = "") -> None:
    """Give a checkpoint the weights of the golden vectors. inside: prefix that only the file has."""
    state = torch.load(file, weights_only=True)
    tensors = state.get("state_dict", state)
    for name, value in tensors.items():
        if value.is_floating_point():
            tensors[name] = GOLDEN["weights"](name.removeprefix(inside), tuple(value.shape))
    torch.save(state, file)


def test_hpsv2_is_the_cosine_of_open_clip(build: Build, fresh: Tiny) -> None:
    settings = fresh("hpsv2")
    with_closed_form(Path(settings["weights"]))
    scorer = build("hpsv2", **settings).scorer
    ids = GOLDEN["clip_ids"]()
    scores = scorer(GOLDEN["pixels"](), scorer.encode_prompts(ids, torch.ones_like(ids)))
    torch.testing.assert_close(scores["score"], torch.tensor(EXPECTED["open-clip"]), **CLOSE)
    torch.testing.assert_close(scores["raw"], scores["score"], rtol=0, atol=0)


def test_image_reward_is_that_of_the_published_package(build: Build, fresh: Tiny) -> None:
    settings = fresh("image-reward")
    with_closed_form(Path(settings["path"]) / "ImageReward.pt")
    scorer = build("image-reward", **settings).scorer
    scores = scorer(GOLDEN["pixels"](), scorer.encode_prompts(*GOLDEN["bert_ids"]()))
    torch.testing.assert_close(scores["score"], torch.tensor(EXPECTED["image-reward"]), **CLOSE)
    expected = scores["score"] * 1.0333394966054072 + 0.16717362830052426
    torch.testing.assert_close(scores["raw"], expected, **CLOSE)


def test_hpsv2_in_half_precision_is_read_in_full(build: Build, fresh: Tiny, samples: Samples, noise: Noise) -> None:
    settings = fresh("hpsv2")
    file = Path(settings["weights"])
    images = noise(3, 40, 56)
    full = build("hpsv2", **settings).score(samples(images)).values
    state = torch.load(file, weights_only=True)["state_dict"]
    torch.save({"state_dict": {name: value.half() for name, value in state.items()}}, file)
    half = build("hpsv2", **settings).score(samples(images)).values
    # Weights of 11 bits, through four layers.
    torch.testing.assert_close(half, full, rtol=0, atol=5e-3)
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_slope_in_fp64(build: Build, samples: Samples, name: str) -> None:
    reward = build(name)
    reward.scorer.double()
    reward.dtype = torch.float64
    random = torch.Generator().manual_seed(1)
    # Enlarged in one image and reduced in the other; away from the corners at 0 and 1.
    for height, width in ((40, 56), (20, 28)):
        images = 0.3 + 0.4 * torch.rand(2, 3, height, width, generator=random, dtype=torch.float64)
        images.requires_grad_()

        def total(pixels: Tensor) -> Tensor:
            return reward.score(samples(pixels)).values.sum()

        (gradient,) = torch.autograd.grad(total(images), images)
        direction = torch.randn(images.shape, generator=random, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            slope = float(total(images + step * direction) - total(images - step * direction)) / (2 * step)
        assert slope != 0
        # fp64: the differences keep ten digits at this step, curvature costs three of them.
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_images_of_several_sizes_score_as_they_do_alone(
    build: Build, samples: Samples, noise: Noise, name: str
) -> None:
    images = tuple(noise(1, *size)[0] for size in ((32, 32), (50, 33), (32, 32), (24, 64)))
    prompts = ["a cat", "x", "a cat", "dusk"]
    together = build(name).score(samples(images, prompts))
    alone = build(name, batch_size=1)
    for row, image in enumerate(images):
        scores = alone.score(samples(image[None], prompts[row : row + 1]))
        torch.testing.assert_close(scores.values, together.values[row : row + 1], **CLOSE)


def test_a_scale_of_100_stays_100_in_bf16(build: Build, fresh: Tiny, samples: Samples, noise: Noise) -> None:
    """bf16 has no number between 4.59375 and 4.625, and exp(4.6052) would be 98.9 or 102."""
    settings = fresh("pickscore")
    model = CLIPModel.from_pretrained(settings["path"])
    model.logit_scale.data.fill_(4.6052)
    model.save_pretrained(settings["path"])
    inputs = samples(noise(3, 32, 32))
    cosines = build("clipscore", **settings, dtype="bfloat16").score(inputs).values
    logits = build("pickscore", **settings, dtype="bfloat16").score(inputs).parts["raw"]
    # exp(4.6052) is 100.003.
    torch.testing.assert_close(logits, 100.003 * cosines, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "aesthetic"])
def test_a_prompt_past_the_encoders_length_is_reported_once_and_counted(
    build: Build, samples: Samples, noise: Noise, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    reward, images = build(name), noise(3, 32, 32)
    length = 35 if name == "image-reward" else 24
    with caplog.at_level(logging.WARNING, logger="unirl"):
        for _ in range(2):
            scores = reward.score(samples(images, ["short", "ab " * 40, "ab " * 41]))
    assert scores.parts["truncated"].tolist() == [0, 1, 1]
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("unirl")]
    assert said.startswith(f"reward.{name}: prompt 'ab ab") and f"the encoder reads {length}." in said
    # Both are cut to the same tokens.
    again = reward.score(samples(images[:1].expand(2, -1, -1, -1), ["ab " * 40, "ab " * 41])).values
    torch.testing.assert_close(again[0], again[1], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_levels_of_8_bits_score_as_the_numbers_that_they_are(
    build: Build, samples: Samples, noise: Noise, name: str
) -> None:
    """They are widened on the device of the encoder; the difference to unrounded pixels is that of the rounding alone."""
    images, reward = noise(3, 40, 56), build(name)
    rounded = levels(images)
    assert torch.equal(reward.score(samples(images)).values, reward.score(samples(rounded)).values)
    assert torch.equal(reward.score(samples(tuple(images))).values, reward.score(samples(tuple(rounded))).values)


UNIT_ROUNDOFF = 2.0**-8
"""Of bf16, whose numbers have 8 significant bits."""
DEPTH = 20
"""Roundings of a number on its way through an encoder of two layers: nine in each, for the outputs of two norms, of
attention and its two products, of two sums and of two linear layers; one of the embedding and one of the projection."""


@pytest.mark.parametrize("name", NAMES)
def test_encoders_in_bf16_score_as_far_from_fp32_as_bf16_rounds(
    build: Build, samples: Samples, noise: Noise, name: str
) -> None:
    """Roundings are independent, each of at most u: a vector of length 1 is off by sqrt(depth) u, a cosine by that of
    both vectors, and a head makes of it as much as its layers can stretch."""
    images = noise(6, 40, 56)
    one, other = (build(name, dtype=dtype) for dtype in ("float32", "bfloat16"))
    expected, result = (reward.score(samples(images)).values for reward in (one, other))
    vectors = {"aesthetic": 1.0, "image-reward": 32**0.5}.get(name, 2**0.5)
    """Lengths of what is compared: a unit vector, a hidden state of width 32 after a norm, two unit vectors."""
    stretch = {"pickscore": float(getattr(one.scorer, "scale", 1.0)) / 26}.get(name, 1.0)
    for layer in getattr(one.scorer, "head", ()):
        if isinstance(layer, torch.nn.Linear):
            stretch *= float(torch.linalg.matrix_norm(layer.weight, 2))
    bound = DEPTH**0.5 * UNIT_ROUNDOFF * vectors * stretch
    assert result.dtype == torch.float32
    assert 0 < float((result - expected).abs().max()) <= bound
