"""The thinking part of a text: where the answer may stand, and whether the text has the asked-for format."""

from __future__ import annotations

from typing import Literal

__all__ = ["Thinking", "answer_part", "is_well_formed"]

Thinking = Literal["optional", "opened", "ignored"]

OPEN, CLOSE = "<think>", "</think>"


def answer_part(text: str, *, thinking: Thinking) -> str:
    """The part of a text in which an answer counts; empty when all of it is thinking.

    thinking: `optional` and `opened` say what a text without </think> is; `ignored` takes the whole text.
    """
    if thinking == "ignored":
        return text
    before, closed, after = text.rpartition(CLOSE)
    if closed:
        return after.partition(OPEN)[0]
    return "" if thinking == "opened" or OPEN in after else before + after


def is_well_formed(text: str, *, thinking: Thinking) -> bool:
    """Whether the text is one <think>...</think> from its start, and then something that is not empty.

    Under `opened` the opening tag stands in the prompt, and may stand in the text as well.
    """
    inside, closed, after = text.partition(CLOSE)
    inside = inside.lstrip()
    opens = inside.startswith(OPEN)
    if not closed or not (opens or thinking == "opened"):
        return False
    rest = inside.removeprefix(OPEN) + after
    return OPEN not in rest and CLOSE not in rest and bool(after.strip())
