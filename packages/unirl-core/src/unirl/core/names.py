"""Misspelt names: what the writer most likely meant."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that `name` most likely stands for; None when nothing is close."""
    from difflib import get_close_matches

    found = get_close_matches(name, sorted(set(options)), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with, or nothing."""
    found = nearest(name, options)
    return f"; did you mean {found!r}?" if found else ""
