"""JPEG size, brightness, exact match and pixel target."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.numerics.pixels import levels
from unirl.rewards.rules import brightness, exact_match, jpeg, pixel_target
from unirl.rewards.rules.config import BrightnessConfig, ExactMatchConfig, JpegSizeConfig, PixelTargetConfig


def samples(count: int, **fields: Any) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(count))
    return ScoreInput(
        **{
            "sample_ids": names,
            "group_ids": names,
            "inputs": Inputs.of_texts(names),
            "metadata": ({},) * count,
            **fields,
        }
    )


def photos() -> Tensor:
    """Three 32 x 48 images whose pixels are whole 255ths: grey, a ramp, noise."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.arange(48).expand(3, 32, 48) * 5
    noise = torch.randint(256, (3, 32, 48), generator=generator)
    return torch.stack([torch.full((3, 32, 48), 128), ramp, noise]).float() / 255


def _pillow_kb(image: Tensor, quality: int) -> float:
    file = io.BytesIO()
    Image.fromarray(np.asarray(image.permute(1, 2, 0) * 255).round().astype("uint8")).save(
        file, "JPEG", quality=quality
    )
    return len(file.getvalue()) / 1000


@pytest.mark.parametrize("quality", [30, 95])
def test_jpeg_size_of_decoded_pixels_is_that_of_their_levels(quality: int) -> None:
    """A scorer that rounds to 8 bits gives the same bits, whether a rollout or the scorer rounds."""
    reward = jpeg.build(JpegSizeConfig(quality=quality), device="cpu")
    decoded = (photos() + 0.4 / 255 * torch.rand(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    one, other = (samples(3, media=Media(kind="image", values=values)) for values in (decoded, levels(decoded)))
    assert torch.equal(reward.score(one).values, reward.score(other).values)


@pytest.mark.parametrize("quality", [30, 95])
def test_jpeg_size_is_the_size_of_pillows_file(quality: int) -> None:
    reward = jpeg.build(JpegSizeConfig(quality=quality), device="cpu")
    expected = [_pillow_kb(image, quality) for image in photos()]
    assert expected[0] < expected[1] < expected[2]
    torch.testing.assert_close(
        reward.score(samples(3, media=Media(kind="image", values=photos()))).values, torch.tensor(expected)
    )


def test_preferring_small_files_turns_the_sign() -> None:
    large, small = (jpeg.build(JpegSizeConfig(prefer=p), device="cpu") for p in ("large", "small"))
    batch = samples(3, media=Media(kind="image", values=photos()))
    torch.testing.assert_close(small.score(batch).values, -large.score(batch).values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (JpegSizeConfig(quality=0), "quality: got 0, expected 1 to 95"),
        (JpegSizeConfig(prefer="big"), "got 'big', expected one of large, small"),
    ],
)
def test_jpeg_settings_are_checked(config: JpegSizeConfig, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        jpeg.build(config, device="cpu")


def test_brightness_is_rec_601_luma() -> None:
    colors = torch.tensor([[0.0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]])
    images = colors[:, :, None, None].expand(6, 3, 8, 8)
    values = (
        brightness.build(BrightnessConfig(), device="cpu")
        .score(samples(6, media=Media(kind="image", values=images)))
        .values
    )
    torch.testing.assert_close(values, torch.tensor([0, 1, 0.299, 0.587, 0.114, 0.443]))


@pytest.mark.parametrize(
    ("text", "answer", "ignore_case", "expected"),
    [
        ("42", "42", True, 1),
        ("  4 2\n", "4 2", True, 1),
        ("a\t b", "a b", False, 1),
        ("Paris", "paris", True, 1),
        ("Paris", "paris", False, 0),
        ("STRASSE", "straße", True, 1),
        ("４２", "42", True, 1),
        ("42.", "42", True, 0),
        ("", "42", True, 0),
        ("4 2", "42", True, 0),
    ],
)
def test_exact_match_forgives_what_it_says_and_no_more(
    text: str, answer: str, ignore_case: bool, expected: int
) -> None:
    reward = exact_match.build(ExactMatchConfig(ignore_case=ignore_case), device="cpu")
    batch = samples(2, media=Media(kind="text", values=(text, "something else")), metadata=({"answer": answer},) * 2)
    assert reward.score(batch).values.tolist() == [expected, 0]


def test_exact_match_needs_texts_and_answers() -> None:
    reward = exact_match.build(ExactMatchConfig(), device="cpu")
    with pytest.raises(RewardFailed, match="got samples without media, expected text"):
        reward.score(samples(1, metadata=({"answer": "1"},)))
    with pytest.raises(RewardFailed, match=r"metadata 'answer' of sample 's1' .* is missing"):
        reward.score(samples(2, media=Media(kind="text", values=("1", "1")), metadata=({"answer": "1"}, {})))
    with pytest.raises(RewardFailed, match=r"is 1, not a string"):
        reward.score(samples(1, media=Media(kind="text", values=("1",)), metadata=({"answer": 1},)))


def test_pixel_target_is_the_negative_mean_square() -> None:
    reward = pixel_target.build(PixelTargetConfig(color=[1.0, 0.0, 0.0]), device="cpu")
    black, red, half = torch.zeros(3, 4, 4), torch.zeros(3, 4, 4), torch.full((3, 4, 4), 0.5)
    red[0] = 1
    values = reward.score(samples(3, media=Media(kind="image", values=torch.stack([black, red, half])))).values
    torch.testing.assert_close(values, torch.tensor([-1 / 3, 0.0, -0.25]))


def test_pixel_target_reads_an_image_file(tmp_path: Path) -> None:
    file = tmp_path / "target.png"
    pixels = np.zeros((2, 4, 3), dtype="uint8")
    pixels[0, 1] = (255, 0, 0)
    Image.fromarray(pixels).save(file)
    reward = pixel_target.build(PixelTargetConfig(image=str(file)), device="cpu")
    values = reward.score(samples(1, media=Media(kind="image", values=torch.zeros(1, 3, 2, 4)))).values
    # One of 24 numbers is off by one.
    torch.testing.assert_close(values, torch.tensor([-1 / 24]))
    with pytest.raises(RewardFailed, match="2 x 4 pixels, the samples have 4 x 4"):
        reward.score(samples(1, media=Media(kind="image", values=torch.zeros(1, 3, 4, 4))))


def test_the_gradient_of_pixel_target_is_right() -> None:
    reward = pixel_target.build(PixelTargetConfig(color=[0.2, 0.9, 0.5]), device="cpu")
    generator = torch.Generator().manual_seed(0)
    # Away from 0 and 1, so that the numeric difference stays inside the range.
    images = (0.1 + 0.8 * torch.rand(2, 3, 3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: reward.score(samples(2, media=Media(kind="image", values=x))).values, (images,)
    )


@pytest.mark.parametrize("config", [PixelTargetConfig(color=[1.0, 0.0]), PixelTargetConfig(color=[2.0, 0, 0])])
def test_pixel_target_colors_are_checked(config: PixelTargetConfig) -> None:
    with pytest.raises(RecipeError, match="expected 3 values, each 0 to 1"):
        pixel_target.build(config, device="cpu")


def test_a_missing_target_file_is_named() -> None:
    with pytest.raises(RecipeError, match=r"no file '/nowhere/target\.png'"):
        pixel_target.build(PixelTargetConfig(image="/nowhere/target.png"), device="cpu")
