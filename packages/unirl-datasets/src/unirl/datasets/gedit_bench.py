"""GEdit-Bench (arXiv 2504.17761) as stepfun-ai/GEdit-Bench has it: instructions of users about their photographs.

Columns as in `GEdit-Bench/generate_image_example.py` of stepfun-ai/Step1X-Edit, which also shows that the image that
is edited is `input_image`; `input_image_raw` has its size before it was scaled.
"""

from __future__ import annotations

from .example import Dropped, Example, PromptSet, SourceRow

__all__ = ["GEDIT_BENCH"]

_KEPT = ("key", "task_type", "instruction_language", "Intersection_exist")


def read(row: SourceRow) -> Example | Dropped:
    instruction, source = row.text("instruction"), row.values["input_image"]
    if not instruction:
        return Dropped("no instruction")
    if source is None:
        return Dropped("no source image")
    return Example(
        question=instruction,
        metadata={name: row.values[name] for name in _KEPT if name in row.values},
        images=(row.image("input_image", source),),
    )


GEDIT_BENCH = PromptSet(
    name="gedit-bench",
    summary="A benchmark of edits: 606 instructions of users in English and in Chinese, of 11 kinds.",
    columns=(("instruction",), ("input_image",), ("key",), ("task_type",), ("instruction_language",)),
    also=("Intersection_exist",),
    read=read,
    instruction="",
    role="source",
)
