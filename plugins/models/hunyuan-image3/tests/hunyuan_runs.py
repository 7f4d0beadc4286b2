"""Short runs of the recipes on the miniature."""

from __future__ import annotations

from pathlib import Path

import unified_models
from unified_models import Steps, image_alone, short, write_edits, write_texts
from unirl.models.hunyuan_image3 import tiny

__all__ = ["IMAGE_ALONE", "SMALL", "THINKS", "run"]

SMALL = short(
    "think", "model.vision_dtype=float32", "sampling.image.height=64", "sampling.image.width=48",
    "sampling.image.num_inference_steps=4", "sampling.image.sde={mode: fraction, last: 0.5}",
    "train.micro_batch_size=2",
)  # fmt: skip
"""The recipe on a miniature. A micro-batch of two rows; two updates on a rollout."""
IMAGE_ALONE = image_alone(SMALL)
"""Those of a recipe that only draws."""
THINKS = "hunyuan-image3/think-recaption"


def run(
    folder: Path,
    checkpoint: Path,
    *words: str,
    recipe: str = THINKS,
    has_sources: bool = True,
    resume: Path | None = None,
) -> Steps:
    """The steps of a recipe on prompts with images of different sizes, or without."""
    prompts = write_edits(folder, tiny.media) if has_sources else write_texts(folder)
    return unified_models.run(folder, checkpoint, prompts, *words, recipe=recipe, resume=resume)
