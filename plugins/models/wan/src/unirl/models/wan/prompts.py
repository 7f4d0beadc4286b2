"""Wan's prompts in engines, cleaned as in diffusers, and their length. Light: recipes are checked with it."""

from __future__ import annotations

import html
from importlib import import_module

__all__ = ["FEATURES_LENGTH", "cleaned", "wrong_length"]

FEATURES_LENGTH = 512
"""Number of prompt tokens at the end, before which diffusers' attention expects features of the image, whatever length
was requested."""


def cleaned(prompt: str, *, engine: str) -> str:
    """The prompt as diffusers cleans it, except for white space.

    Raises ValueError for a prompt that may need ftfy where the engine's environment has none: ftfy leaves printable
    ASCII alone.
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
