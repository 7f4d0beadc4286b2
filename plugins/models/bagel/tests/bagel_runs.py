"""Runs of the recipes on the miniature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_runs
from unirl.models.bagel import tiny

SMALL = [
    "data.train=prompts.jsonl", "run.max_steps=2", "run.media_every=0", "run.threads=1", "model.dtype=float32",
    "model.vision_dtype=float32", "data.prompts_per_step=2", "stages.plan.samples=2", "stages.image.samples=2",
    "sampling.plan.max_new_tokens=4", "sampling.image.height=32", "sampling.image.width=48",
    "sampling.image.num_inference_steps=4", "sampling.image.sde={mode: fraction, last: 0.5}",
    "backend.mixed_precision=none", "backend.activation_checkpointing=false", "eval.every=0",
]  # fmt: skip
"""The recipe on a miniature, in fp32. A micro-batch of two rows; two updates on a rollout."""


def run(
    folder: Path, checkpoint: Path, *words: str, recipe: str = "bagel/unigrpo", has_sources: bool = True
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
    result = small_runs.run(folder / "out", f"model.path={checkpoint}", *words, recipe=recipe, small=())
    return list(small_runs.steps(result.folder).values())
