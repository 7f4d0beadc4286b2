"""Images of text for conformance."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

__all__ = ["draw"]

_WORDS = ("OPEN", "Cafe 24", "OPEN now", "Cafe 42", "CLOSED")


def draw(*, height: int, width: int, seed: int) -> Tensor:
    """[3, height, width] one of a few words, dark on light, somewhere in the image."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), tuple(random.integers(200, 256, 3).tolist()))
    left, top = int(random.integers(4, width // 8)), int(random.integers(4, height // 4))
    ImageDraw.Draw(image).text(
        (left, top),
        _WORDS[seed % len(_WORDS)],
        fill=tuple(random.integers(0, 80, 3).tolist()),
        font=ImageFont.load_default(height // 2),
    )
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)
