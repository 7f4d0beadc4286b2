"""An environment of one function, to copy: it holds a number that the model guesses."""

from __future__ import annotations

import re

__all__ = ["guess"]


def guess(answer: str, turn: int, number: int) -> str | float:
    """What follows a guess of `number`, a metadata key of the prompts; the sooner it is right, the better."""
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return "Say a number."
    if int(numbers[-1]) == number:
        return 1.0 / (turn + 1)
    return "Higher." if int(numbers[-1]) < number else "Lower."
