"""DAPO-Math-17k (arXiv 2503.14476), as published: chat messages in `prompt`, the answer in `reward_model`.

The public table has each prompt about a hundred times, and seven prompts with two answers.
"""

from __future__ import annotations

import re

from .example import Dropped, Example, PromptSet, SourceRow, as_list, as_object

__all__ = ["DAPO_MATH_17K"]

_BEFORE = re.compile(r"\ASolve the following math problem step by step\.[^\n]*\n\n")
_AFTER = re.compile(r"\n\nRemember to put your answer on its own line after \"Answer:\"\.?\s*\Z")
"""Instructions around each question, for answers after "Answer:"; prompts get the one that the user chooses."""


def read(row: SourceRow) -> Example | Dropped:
    question = _AFTER.sub("", _BEFORE.sub("", _question(row))).strip()
    model = as_object(row.values["reward_model"])
    if model is None or "ground_truth" not in model:
        raise row.wrong("reward_model", "an object with 'ground_truth'", row.values["reward_model"])
    answer = model["ground_truth"]
    if not question:
        return Dropped("no question")
    if answer is None or not str(answer).strip():
        return Dropped("no answer")
    return Example(question=question, answer=str(answer).strip())


def _question(row: SourceRow) -> str:
    """The one message of the user, or the prompt where it is text, as in sets made from this one."""
    messages = as_list(row.values["prompt"])
    if messages is None:
        return row.text("prompt")
    message = as_object(messages[0]) if len(messages) == 1 else None
    content: object = message.get("content") if message and message.get("role") == "user" else None
    if not isinstance(content, str):
        raise row.wrong("prompt", "a list of one message of the user", messages)
    return content


DAPO_MATH_17K = PromptSet(
    name="dapo-math-17k",
    summary="Competition problems with integer answers; also AIME files of that layout (BytedTsinghua-SIA).",
    columns=(("prompt",), ("reward_model",)),
    read=read,
)
