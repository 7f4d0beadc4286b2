"""The soft overlong penalty."""

from __future__ import annotations

__all__ = ["overlong_penalty"]


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """Penalty of a completion of `length` generated tokens, from -1 to 0.

    0 up to `max_tokens - buffer`, then linear down to -1 at `max_tokens`, and -1 beyond. 0 < buffer <= max_tokens.

    Source: DAPO, arXiv 2503.14476, equation 13; `max_tokens` is its L_max, `buffer` its L_cache.
    """
    assert 0 < buffer <= max_tokens
    return -min(max(length - (max_tokens - buffer), 0) / buffer, 1.0)
