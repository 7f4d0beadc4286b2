"""Names and values in messages: suggestions for misspelt names, long values cut short; normalised names of dists."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["canonical", "did_you_mean", "nearest", "shortened"]


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that `name` most likely means; None when nothing is close."""
    from difflib import get_close_matches

    result = get_close_matches(name, sorted(set(options)), n=1, cutoff=0.6)
    return result[0] if result else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with, or nothing."""
    result = nearest(name, options)
    return f"; did you mean {result!r}?" if result else ""


def shortened(text: str, limit: int) -> str:
    """The text, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def canonical(dist: str) -> str:
    """A dist's name, normalised as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", dist).lower()
