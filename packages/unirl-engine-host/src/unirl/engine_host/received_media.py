"""Engine side of `sent_media`: the images of a prompt, as training reads them. Runs in the environments of engines."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.numerics.media import LoadedImage

__all__ = ["PIXELS", "echoed", "read_media", "read_turns"]

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


def read_turns(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Turns with their images in memory, as `read_media` gives them."""
    return tuple(dataclasses.replace(turn, media=read_media(turn.media)) for turn in turns)


def echoed(media: Sequence[MediaRef], turns: Sequence[Turn]) -> list[str]:
    """The echo of what a row was encoded from besides its text: the hash of each image, and of each turn, its text,
    tokens and images.

    media, turns: as `read_media` and `read_turns` give them, whose URIs are hashes.
    """
    result = [ref.uri for ref in media]
    for turn in turns:
        content = (turn.stage, turn.text, turn.tokens, tuple(ref.uri for ref in turn.media))
        result.append(f"turn:{hashlib.sha256(repr(content).encode()).hexdigest()}")
    return result
