"""Short runs of the recipes on the miniature."""

from __future__ import annotations

from pathlib import Path

import unified_models
from unified_models import Steps, short, write_edits, write_texts
from unirl.models.bagel import tiny

__all__ = ["SMALL", "UNIGRPO", "run"]

SMALL = short(
    "plan", "model.vision_dtype=float32", "sampling.image.height=32", "sampling.image.width=48",
    "sampling.image.num_inference_steps=4", "sampling.image.sde={mode: fraction, last: 0.5}",
)  # fmt: skip
"""The recipe on a miniature. A micro-batch of two rows; two updates on a rollout."""
UNIGRPO = "bagel/unigrpo"


def run(
    folder: Path,
    checkpoint: Path,
    *words: str,
    recipe: str = UNIGRPO,
    has_sources: bool = True,
    resume: Path | None = None,
) -> Steps:
    """The steps of a recipe on prompts with images of different sizes, or without."""
    prompts = write_edits(folder, tiny.media) if has_sources else write_texts(folder)
    return unified_models.run(folder, checkpoint, prompts, *words, recipe=recipe, resume=resume)
