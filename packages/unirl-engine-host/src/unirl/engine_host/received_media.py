"""Engine side of `sent_media`: the images of a prompt, as training reads them. Runs in the environments of engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from unirl.core.types.data import MediaRef
from unirl.numerics.media import LoadedImage

__all__ = ["PIXELS", "read_media"]

PIXELS = "pixels"
"""Name of the tensor in a file: [3, H, W], fp32 in [0, 1], or the n of n / 255 in 8 bits."""


def read_media(media: Sequence[MediaRef]) -> tuple[LoadedImage, ...]:
    """Images in memory, which `unirl.numerics.media` reads like any other. The URI of each is a hash of its pixels as
    they were read here, for the echo."""
    result: list[LoadedImage] = []
    for ref in media:
        pixels = load_file(ref.uri)[PIXELS]
        if pixels.dtype is torch.uint8:
            pixels = pixels.float() / 255
        result.append(LoadedImage.of(pixels, role=ref.role))
    return tuple(result)
