"""Geometry3K (arXiv 2105.04165) as hiyouga/geometry3k has it: `images`, `problem` with <image> marks, and `answer`."""

from __future__ import annotations

from .example import Dropped, Example, PromptSet, SourceRow, as_list, as_object

__all__ = ["GEOMETRY3K"]

MARK = "<image>"


def read(row: SourceRow) -> Example | Dropped:
    problem, answer = row.text("problem"), row.text("answer")
    images = tuple(_image(row, item) for item in as_list(row.values["images"]) or ())
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


def _image(row: SourceRow, item: object) -> bytes:
    """The file of an image, which stands in the row or beside the source."""
    fields = as_object(item) or {"path": item}
    data, path = fields.get("bytes"), fields.get("path")
    if isinstance(data, bytes) and data:
        return data
    if isinstance(path, str) and path and (file := row.folder / path).is_file():
        return file.read_bytes()
    raise row.wrong("images", "image files: their bytes, or paths that start at the source's folder", item)


GEOMETRY3K = PromptSet(
    name="geometry3k",
    summary="Questions about a figure: 2,101 for training, 300 and 601 for tests (hiyouga/geometry3k).",
    columns=(("images",), ("problem",), ("answer",)),
    read=read,
)
