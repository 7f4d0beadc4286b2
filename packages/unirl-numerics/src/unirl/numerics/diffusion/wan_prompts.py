"""Wan's prompts: cleaned as diffusers does it, in the environments of engines, and their length. Imports no torch."""

from __future__ import annotations

import html
from importlib import import_module

__all__ = ["FEATURES_LENGTH", "cleaned", "wrong_length"]

FEATURES_LENGTH = 512
"""Number of prompt tokens before which diffusers' attention expects features of the image, whatever was asked."""


def cleaned(prompt: str, *, engine: str) -> str:
    """As diffusers cleans prompts, but for joining the words.

    Raises ValueError where that takes ftfy, which the engine's environment has not: printable ASCII is what ftfy leaves
    alone.
    """
    try:
        ftfy = import_module("ftfy")
    except ImportError:
        if not (prompt.isascii() and prompt.replace("\n", " ").replace("\t", " ").isprintable()):
            raise ValueError(
                f"prompt {prompt!r}: Wan's prompts are cleaned with ftfy, which is not installed beside {engine} and "
                "may change this one. Install ftfy there, or use printable ASCII, or engine=trainside."
            ) from None
    else:
        prompt = ftfy.fix_text(prompt)
    return html.unescape(html.unescape(prompt))


def wrong_length(length: int) -> str:
    """Why prompts of this length are refused beside features of the first frame."""
    return (
        f"got {length}; this checkpoint reads features of the first frame, which diffusers' attention looks for before "
        f"the last {FEATURES_LENGTH} tokens. Set it to {FEATURES_LENGTH}."
    )
