"""The text that an image is to show, and how well another text agrees with it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapidfuzz.distance import LCSseq, Levenshtein

__all__ = ["Agreement", "agreement", "normalised", "target_of"]

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well a text agrees with the target; each in [0, 1]."""

    similarity: float
    """1 - min(d, n) / n, with the edit distance d and the target's length n: text besides the target costs as much as
    text that is missing."""
    exact: float
    """1 if both are equal."""
    substring: float
    """1 if the target is in the text, whatever else is."""
    contained: float
    """1 if the target is in the text, else the similarity. Source: `flow_grpo/ocr.py` of the repository of Flow-GRPO
    (arXiv 2505.05470)."""
    precision: float
    """Length of the longest common subsequence as a fraction of the text: 1 where nothing was added; 0 without text."""


def target_of(prompt: str, metadata: Mapping[str, Any]) -> str:
    """Metadata `text` if there is one, else the text between the first pair of quotation marks, straight or curly.

    Raises ValueError without a target, or for one without a visible character.
    """
    if "text" in metadata:
        target = metadata["text"]
        if not isinstance(target, str):
            raise ValueError(f"metadata 'text': got {target!r}, expected a string.")
    else:
        match = _QUOTED.search(prompt)
        if match is None:
            raise ValueError(
                "no target: expected metadata 'text', or a text between quotation marks in the prompt; add one."
            )
        target = match[1] if match[1] is not None else match[2]
    if not normalised(target):
        raise ValueError(f"got the target {target!r}, expected a visible character in it.")
    return target


def normalised(text: str) -> str:
    """Unicode NFKC, lower case, without white space."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def agreement(text: str, target: str) -> Agreement:
    """How well `text` agrees with `target`, both normalised first. The target has a visible character."""
    result, expected = normalised(text), normalised(target)
    distance, length = Levenshtein.distance(result, expected), len(expected)
    similarity, is_inside = 1 - min(distance, length) / length, expected in result
    return Agreement(
        similarity=similarity,
        exact=float(result == expected),
        substring=float(is_inside),
        contained=1.0 if is_inside else similarity,
        precision=LCSseq.similarity(result, expected) / len(result) if result else 0.0,
    )
