"""Long texts for the page: their beginning and end at a glance, the rest on demand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Folded", "fold"]

SLACK = 100
"""A text that is longer than its glance by no more than so many characters is shown as it is."""
MOST = 20_000
"""Characters of a text that the page holds at most: it is one file, and its texts may be whole books."""


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A text in the pieces that the page shows: `head` and `tail` at first, `shown` when it is unfolded."""

    head: str
    tail: str
    """Empty when the head is all of the text."""
    shown: tuple[str, ...]
    """All of the text, or its two ends when it is longer than the page holds."""
    num_characters: int
    num_hidden: int
    """Characters that are not on the page at all."""


def fold(text: str, *, glance: int, most: int = MOST) -> Folded:
    """Pieces of a text that the page shows.

    glance: characters that are seen at first, three quarters of them the beginning: the end is where the answer is.
    most: characters that are on the page at most.
    """
    if len(text) <= glance + SLACK:
        return Folded(head=text, tail="", shown=(text,), num_characters=len(text), num_hidden=0)
    end = glance // 4
    half = most // 2
    hidden = max(0, len(text) - 2 * half)
    return Folded(
        head=text[: glance - end].rstrip(),
        tail=text[len(text) - end :].lstrip(),
        shown=(text[:half], text[len(text) - half :]) if hidden else (text,),
        num_characters=len(text),
        num_hidden=hidden,
    )
