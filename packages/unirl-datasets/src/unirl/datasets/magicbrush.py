"""MagicBrush (arXiv 2306.10012) as osunlp/MagicBrush has it: sessions of edits, one row for each turn.

Columns as in code that loads it: `img_id`, `turn_index`, `source_img`, `mask_img`, `instruction` and `target_img`. The
source of a later turn is the result of the turn before. Masks and targets are left out.
"""

from __future__ import annotations

from .example import Dropped, Example, PromptSet, SourceRow

__all__ = ["MAGICBRUSH"]


def read(row: SourceRow) -> Example | Dropped:
    instruction, source = row.text("instruction"), row.values["source_img"]
    if not instruction:
        return Dropped("no instruction")
    if source is None:
        return Dropped("no source image")
    return Example(
        question=instruction,
        metadata={name: row.values[name] for name in ("img_id", "turn_index")},
        images=(row.image("source_img", source),),
    )


MAGICBRUSH = PromptSet(
    name="magicbrush",
    summary="Edits of photographs by hand-written instructions: 8,807 for training, 528 for development.",
    columns=(("instruction",), ("source_img",), ("img_id",), ("turn_index",)),
    read=read,
    instruction="",
    role="source",
)
