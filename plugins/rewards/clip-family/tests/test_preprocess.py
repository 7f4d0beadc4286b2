"""Preprocessing against Pillow and the image processors of transformers, which round to 8 bits, and its gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil
from unirl.core.errors import RecipeError
from unirl.numerics.pixels import resize
from unirl.rewards.clip_family.preprocess import CLIP_MEAN, CLIP_STD, Preprocess

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
QUANTISED = 1.2 / 255
"""Pillow rounds after each pass: half of 1/255 twice, the first one times the sum of the second pass's absolute
weights, which is at most 1.27 for bicubic."""
SIZES = [((40, 56), (17, 23)), ((17, 23), (40, 56)), ((64, 24), (32, 32)), ((24, 64), (32, 32)), ((31, 90), (31, 30))]
"""Smaller, larger, each edge the other way, and one edge alone: Pillow's order of the passes depends on it."""


def pil(image: Tensor) -> Image.Image:
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().numpy().astype("uint8"))


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize(("old", "new"), SIZES)
@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_resize_is_that_of_pillow_in_floats(
    noise: Callable[..., Tensor], name: Literal["bilinear", "bicubic"], old: tuple[int, int], new: tuple[int, int]
) -> None:
    # Between 0.35 and 0.65 no pass leaves [0, 1], where Pillow does not clip floats.
    image = 0.35 + 0.3 * noise(1, *old)[0]
    planes = [Image.fromarray(plane.numpy()).resize(new[::-1], FILTERS[name]) for plane in image]
    expected = torch.stack([torch.from_numpy(np.asarray(plane).copy()) for plane in planes])
    # Sums of at most 32 products in fp32 on both sides.
    torch.testing.assert_close(resize(image[None], new, filter=name)[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("old", "new"), SIZES)
@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_resize_is_that_of_pillow_in_8_bits_within_its_rounding(
    noise: Callable[..., Tensor], name: Literal["bilinear", "bicubic"], old: tuple[int, int], new: tuple[int, int]
) -> None:
    image = noise(1, *old)
    # Noise overshoots 0 and 1: both clip after each pass.
    expected = tensor(pil(image[0]).resize(new[::-1], FILTERS[name]))
    assert float((resize(image, new, filter=name)[0] - expected).abs().max()) <= QUANTISED


CLIP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
PROCESSORS = [
    pytest.param(CLIPImageProcessorPil, CLIP, id="crop"),
    pytest.param(CLIPImageProcessorPil, {"size": 36, "crop_size": 31}, id="old-style-numbers"),
    pytest.param(CLIPImageProcessorPil, {**CLIP, "resample": 2}, id="bilinear"),
    pytest.param(SiglipImageProcessorPil, {"size": {"height": 32, "width": 24}}, id="stretch"),
]


@pytest.mark.parametrize("size", [(32, 32), (57, 40), (40, 57), (20, 45), (33, 32)])
@pytest.mark.parametrize(("processor", "settings"), PROCESSORS)
def test_a_preprocessor_config_is_read_as_transformers_reads_it(
    noise: Callable[..., Tensor], tmp_path: Path, processor: Any, settings: dict[str, Any], size: tuple[int, int]
) -> None:
    config = {"resample": 3, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    image = noise(1, *size)
    expected = processor.from_pretrained(tmp_path)(pil(image[0]), return_tensors="pt")["pixel_values"]
    result = Preprocess.of_folder(tmp_path, key="reward.clipscore.path")(image)
    # The rounding, over the smallest deviation.
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= QUANTISED / min(CLIP_STD)


def test_hpsv2_pads_the_whole_image_with_black(noise: Callable[..., Tensor]) -> None:
    preprocess = Preprocess(size_px=(32, 32), fit="pad", mean=(0.0,) * 3, std=(1.0,) * 3)
    image = noise(1, 40, 61)
    # 40 x 32 / 61 = 20.98 rows: 5 rows of black above and 6 below, as the published package rounds.
    expected = tensor(ImageOps.expand(pil(image[0]).resize((32, 21), Image.Resampling.BICUBIC), (0, 5, 0, 6)))
    assert float((preprocess(image)[0] - expected).abs().max()) <= QUANTISED


def test_the_crop_of_image_reward_rounds_half_a_pixel_to_even() -> None:
    # 35 columns to 32: torchvision's CenterCrop starts at round(1.5) = 2, transformers' at 3 // 2 = 1.
    image = torch.arange(35.0).expand(1, 3, 32, 35) / 35
    plain = {"size_px": (32, 32), "fit": "crop", "edge_px": 32, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    starts = [Preprocess(**plain, rounds_crop=rounds)(image)[0, 0, 0, 0] * 35 for rounds in (True, False)]
    assert [round(float(start)) for start in starts] == [2, 1]


@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
def test_the_gradient_goes_through_every_fit(fit: Literal["crop", "stretch", "pad"]) -> None:
    preprocess = Preprocess(size_px=(6, 6), fit=fit, edge_px=7)
    # Away from 0 and 1, where both have a corner.
    random = torch.Generator().manual_seed(0)
    images = (0.35 + 0.3 * torch.rand(1, 3, 9, 13, generator=random, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(preprocess, (images,))


@pytest.mark.parametrize(
    "settings",
    [
        {"resample": 1},
        {"do_normalize": False},
        {"rescale_factor": 1.0},
        {"size": {"shortest_edge": 32}, "do_center_crop": False},
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 32, "width": 32}},
        {"image_mean": None},
    ],
    ids=["lanczos", "no-normalise", "no-rescale", "no-crop", "crop-larger-than-image", "no-mean"],
)
def test_other_steps_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = {**CLIP, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"reward\.pickscore\.path: .* asks for other steps"):
        Preprocess.of_folder(tmp_path, key="reward.pickscore.path")
