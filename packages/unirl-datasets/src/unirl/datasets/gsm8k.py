"""GSM8K (arXiv 2110.14168), as published: `question`, and `answer` as worked steps with the number behind `####`."""

from __future__ import annotations

from .example import Dropped, Example, PromptSet, SourceRow

__all__ = ["GSM8K"]


def read(row: SourceRow) -> Example | Dropped:
    question = row.text("question")
    _, marked, number = row.text("answer").rpartition("####")
    if not question:
        return Dropped("no question")
    if not marked or not number.strip():
        return Dropped("no `####` with a number behind it in the answer")
    return Example(question=question, answer=number.strip().replace(",", ""))


GSM8K = PromptSet(
    name="gsm8k",
    summary="Grade school word problems: 7,473 for training and 1,319 for tests (openai/gsm8k, or its JSONL files).",
    columns=(("question",), ("answer",)),
    read=read,
)
