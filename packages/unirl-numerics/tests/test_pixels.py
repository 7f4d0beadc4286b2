"""Pixels of 8 bits: where they are rounded, and what reads them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.types.media import unit_range
from unirl.numerics.pixels import levels, widened


def test_levels_are_the_nearest_255ths_and_rounding_again_changes_nothing() -> None:
    exact = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(levels(unit_range(exact)), exact)
    assert levels(exact) is exact
    pixels = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    # Half of a level, and the rounding of fp32.
    assert float((widened(levels(pixels)) - pixels).abs().max()) <= 0.5 / 255 + 1e-7
    # A decoder's rounding at the ends is clamped; bf16 is widened first.
    ends = torch.tensor([-5e-5, 1 + 5e-5, 0.5])
    assert levels(ends).tolist() == [0, 255, 128]
    assert levels(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [128]
    assert levels(torch.rand(0, 3, 4, 4)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("wrong", [math.nan, -0.01, 1.01, math.inf])
def test_pixels_that_have_no_level_are_refused(wrong: float) -> None:
    pixels = torch.full((1, 3, 2, 2), 0.5)
    pixels[0, 1, 0, 1] = wrong
    with pytest.raises(BatchError, match=r"pixels: got values from .*, expected 0 to 1"):
        levels(pixels)


def test_scorers_of_8_bits_see_the_pixels_that_they_saw_before() -> None:
    """They round(255 x): of x as it was decoded, and of its level read back."""

    def rounded(pixels: Tensor) -> Tensor:
        return (pixels.float().clamp(0, 1) * 255).round().byte()

    pixels = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(unit_range(levels(pixels))), rounded(pixels))
