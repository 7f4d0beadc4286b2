"""A reward for random language models, which answer nothing: in the calling convention of TRL and of `function`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["digits"]


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """Fraction of digits in each completion, and up to 0.01 by its checksum, so that no two of a group are equal."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [
        sum(letter.isdigit() for letter in text) / max(1, len(text)) + zlib.crc32(text.encode()) % 97 / 1e4
        for text in texts
    ]
