"""Videos as animated pictures, without an encoder of videos."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from PIL import Image

__all__ = ["gif"]


def gif(frames: Iterable[Any], *, rate: float) -> bytes:
    """An animated GIF that is played again and again.

    frames: uint8 [H, W, 3] arrays of NumPy.  rate: frames a second, > 0.
    """
    first, *others = map(Image.fromarray, frames)
    content = io.BytesIO()
    first.save(content, format="GIF", save_all=True, append_images=others, duration=round(1000 / rate), loop=0)
    return content.getvalue()
