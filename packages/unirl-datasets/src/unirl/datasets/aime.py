"""AIME problems in the layouts in which they are published: the answer is an integer from 0 to 999."""

from __future__ import annotations

import re

from .example import Dropped, Example, PromptSet, SourceRow

__all__ = ["AIME"]

QUESTION = ("problem", "Problem", "question")
ANSWER = ("answer", "Answer", "solution")
"""The first existing column is used. math-ai/aime24 has no answer column; its solution is just the boxed answer."""
KEPT = {"id": "id", "ID": "id", "year": "year"}
_INTEGER = re.compile(r"(?:\\boxed\{)?\$?0*([0-9]{1,3})\$?\}?(?:\^\{?\\circ\}?)?\.?")


def read(row: SourceRow) -> Example | Dropped:
    question = row.text(next(name for name in QUESTION if name in row.values))
    column = next(name for name in ANSWER if name in row.values)
    value = row.values[column]
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else row.text(column)
    if not question:
        return Dropped("no question")
    integer = _INTEGER.fullmatch(text)
    if integer is None:
        return Dropped("the answer is not an integer from 0 to 999")
    kept = {KEPT[name]: result for name in KEPT if (result := row.values.get(name)) is not None}
    return Example(question=question, answer=integer[1], metadata=kept)


AIME = PromptSet(
    name="aime",
    summary="30 problems a year, for evaluation: HuggingFaceH4, Maxwell-Jia, math-ai, opencompass, yentinglin.",
    columns=(QUESTION, ANSWER),
    also=tuple(KEPT),
    read=read,
)
