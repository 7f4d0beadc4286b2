"""Reading numbers out of a judge's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

__all__ = ["number_after", "number_matching", "numbers_of_json"]

_NUMBER = r"[-+]?\d+(?:\.\d+)?"


def number_after(answer: str, marker: str, highest: float) -> float | None:
    """The number after the last `marker`, whatever its case and whatever emphasis is around it.

    None if there is none, if it is a span ("3-4"), or a share of something other than `highest` ("7/10" of 5).
    """
    words = re.escape(marker.rstrip(" :="))
    # Digits that follow directly, a span, and what the number is out of.
    tail = rf"(?![\d.,]*\d)(?!\s*[-–]\s*\d)(?:\s*(?:/|out of)\s*({_NUMBER}))?"
    matches = list(re.finditer(rf"{words}[\s:=*_`\[(\"']*({_NUMBER}){tail}", answer, flags=re.IGNORECASE))
    if not matches:
        return None
    number, whole = matches[-1].groups()
    return None if whole is not None and float(whole) != highest else float(number)


def number_matching(answer: str, pattern: str) -> float | None:
    """The group of the last match, as a number."""
    matches = list(re.finditer(pattern, answer))
    return _number(matches[-1].group(1)) if matches else None


def numbers_of_json(answer: str, names: Sequence[str]) -> list[float | None]:
    """The numbers under these keys of the last JSON object that has them all; prose and code fences may surround it."""
    result: list[float | None] = [None] * len(names)
    place = answer.find("{")
    while place >= 0:
        try:
            value, end = cast("tuple[dict[str, Any], int]", json.JSONDecoder().raw_decode(answer, place))
        except ValueError:
            end = place + 1
        else:
            if all(name in value for name in names):
                result = [_number(value[name]) for name in names]
        place = answer.find("{", end)
    return result


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
