"""The thinking part of a completion: where the answer may be, and whether the format is right."""

from __future__ import annotations

from typing import Literal

__all__ = ["Thinking", "answer_part", "is_well_formed"]

Thinking = Literal["optional", "opened", "ignored"]

OPEN, CLOSE = "<think>", "</think>"


def answer_part(text: str, *, thinking: Thinking) -> str:
    """The part of a completion that may hold the answer; empty when all of it is thinking.

    thinking: `optional` and `opened` differ for a completion without </think>; `ignored` takes all of it.
    """
    if thinking == "ignored":
        return text
    before, closed, after = text.rpartition(CLOSE)
    if closed:
        return after.partition(OPEN)[0]
    return "" if thinking == "opened" or OPEN in after else before + after


def is_well_formed(text: str, *, thinking: Thinking) -> bool:
    """Whether the text is one <think>...</think> from its start, and then something that is not empty.

    Under `opened` the opening tag is in the prompt, and may be in the text as well.
    """
    inside, closed, after = text.partition(CLOSE)
    inside = inside.lstrip()
    opens = inside.startswith(OPEN)
    if not closed or not (opens or thinking == "opened"):
        return False
    rest = inside.removeprefix(OPEN) + after
    return OPEN not in rest and CLOSE not in rest and bool(after.strip())
