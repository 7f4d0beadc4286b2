"""Whether an output is the expected one."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

__all__ = ["same_output", "same_value"]


def same_output(result: str, expected: str, *, tolerance: float) -> bool:
    """Line by line without trailing white space and trailing empty lines; else the same words, numbers by value.

    Source: the checker of LiveCodeBench (arXiv 2403.07974), which compares lines, then numbers of a line.
    """
    lines, others = (_lines(text) for text in (result, expected))
    if len(lines) != len(others):
        return False
    return all(
        line == other
        or (
            len(words := line.split()) == len(expected_words := other.split())
            and all(_same_word(a, b, tolerance=tolerance) for a, b in zip(words, expected_words, strict=True))
        )
        for line, other in zip(lines, others, strict=True)
    )


_KEYS = (str, int, float, bool)


def same_value(result: Any, expected: Any, *, tolerance: float) -> bool:
    """Equal as JSON values: tuples are lists, true is not 1, and numbers differ by the tolerance at most."""
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(
            same_value(a, b, tolerance=tolerance) for a, b in zip(result, expected, strict=True)
        )
    if isinstance(result, dict) and isinstance(expected, dict):
        # Keys of JSON are text.
        if len(result) != len(expected) or not all(key is None or type(key) in _KEYS for key in result):
            return False
        named, others = ({str(key): value for key, value in item.items()} for item in (result, expected))
        return named.keys() == others.keys() and all(
            same_value(named[key], others[key], tolerance=tolerance) for key in named
        )
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(result, int | float) and isinstance(expected, int | float):
        if result == expected or not (math.isfinite(result) and math.isfinite(expected)):
            return result == expected
        return abs(result - expected) <= tolerance * max(1, abs(expected))
    return type(result) is type(expected) and bool(result == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(result: str, expected: str, *, tolerance: float) -> bool:
    if result == expected:
        return True
    try:
        number, other = Decimal(result), Decimal(expected)
    except InvalidOperation:
        return False
    if not (number.is_finite() and other.is_finite()):
        return False
    return number == other or abs(number - other) <= Decimal(tolerance) * max(Decimal(1), abs(other))
