"""Geometry3K (arXiv 2105.04165) as hiyouga/geometry3k has it: `images`, `problem` with <image> marks, and `answer`."""

from __future__ import annotations

from .example import Dropped, Example, PromptSet, SourceRow, as_list

__all__ = ["GEOMETRY3K"]

MARK = "<image>"


def read(row: SourceRow) -> Example | Dropped:
    problem, answer = row.text("problem"), row.text("answer")
    images = tuple(row.image("images", item) for item in as_list(row.values["images"]) or ())
    if not images:
        return Dropped("no image")
    marks, question = problem.count(MARK), problem.replace(MARK, "").strip()
    if not question:
        return Dropped("no question")
    if not answer:
        return Dropped("no answer")
    if marks not in (0, len(images)):
        return Dropped("not as many <image> marks as images")
    return Example(question=question, answer=answer, images=images)


GEOMETRY3K = PromptSet(
    name="geometry3k",
    summary="Questions about a figure: 2,101 for training, 300 and 601 for tests (hiyouga/geometry3k).",
    columns=(("images",), ("problem",), ("answer",)),
    read=read,
)
