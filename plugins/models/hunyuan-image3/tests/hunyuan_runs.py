"""Runs of the recipes on the miniature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_runs
from unirl.models.hunyuan_image3 import tiny

SMALL = [
    "data.train=prompts.jsonl", "run.max_steps=2", "run.media_every=0", "run.threads=1", "model.dtype=float32",
    "model.vision_dtype=float32", "data.prompts_per_step=2", "stages.think.samples=2", "stages.image.samples=2",
    "sampling.think.max_new_tokens=4", "sampling.image.height=64", "sampling.image.width=48",
    "sampling.image.num_inference_steps=4", "sampling.image.sde={mode: fraction, last: 0.5}",
    "backend.mixed_precision=none", "backend.activation_checkpointing=false", "eval.every=0",
    "train.micro_batch_size=2",
]  # fmt: skip
"""The recipe on a miniature, in fp32. A micro-batch of two rows; two updates on a rollout."""
IMAGE_ALONE = [
    word.replace("sampling.image.", "sampling.")
    for word in SMALL
    if "think" not in word and not word.startswith("stages.")
]
"""Those of a recipe that only draws."""


def run(
    folder: Path,
    checkpoint: Path,
    *words: str,
    recipe: str = "hunyuan-image3/think-recaption",
    has_sources: bool = True,
    resume: Path | None = None,
) -> list[Mapping[str, Any]]:
    """Metrics of each step. has_sources: two prompts of one text, one with an image, one with two, of other sizes; else
    two texts."""
    rows: list[dict[str, Any]] = [{"prompt": "a red ring"}, {"prompt": "two blue squares"}]
    if has_sources:
        rows = [
            {
                "prompt": "make it red",
                "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
            }
            for refs in (tiny.media(folder, number=number) for number in (0, 2))
        ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (f"model.path={checkpoint}", *words)
    result = small_runs.run(folder / "out", *words, recipe=recipe, small=(), resume=resume)
    return list(small_runs.steps(result.folder).values())
