"""Models that write and draw: inputs of tests, and short runs of their recipes on miniatures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import small_runs
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn

__all__ = [
    "Steps",
    "check_equal_steps",
    "check_joint_steps",
    "given",
    "image_alone",
    "run",
    "short",
    "write_edits",
    "write_texts",
]

Steps = Sequence[Mapping[str, Any]]
"""Metrics of each step of a run."""


def given(
    texts: tuple[str, ...],
    media: tuple[tuple[MediaRef, ...], ...] | None = None,
    turns: tuple[tuple[Turn, ...], ...] | None = None,
) -> Inputs:
    """Inputs with an id each."""
    ids = tuple(map(str, range(len(texts))))
    return Inputs(ids=ids, prompts=texts, texts=texts, media=media or ((),) * len(texts), turns=turns)


def short(text: str, *more: str) -> list[str]:
    """Overrides for two steps of a recipe in fp32, whose stage `image` is made from the stage `text`."""
    return [
        "run.max_steps=2", "run.media_every=0", "run.threads=1", "eval.every=0", "model.dtype=float32",
        "data.prompts_per_step=2", f"stages.{text}.samples=2", "stages.image.samples=2",
        f"sampling.{text}.max_new_tokens=4", "backend.mixed_precision=none", "backend.activation_checkpointing=false",
        *more,
    ]  # fmt: skip


def image_alone(words: Sequence[str]) -> list[str]:
    """Those of `short` for a recipe of images alone."""
    own = [
        word for word in words if word.startswith("sampling.image.") or not word.startswith(("stages.", "sampling."))
    ]
    return [word.replace("sampling.image.", "sampling.") for word in own]


def write_edits(folder: Path, media: Callable[..., Sequence[MediaRef]]) -> str:
    """Prompts of one text in a file: one with an image, one with two, of other sizes.  media: of a miniature.

    Returns the override that names the file."""
    rows = [
        {
            "prompt": "make it red",
            "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
        }
        for refs in (media(folder, number=number) for number in (0, 2))
    ]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"data.train={folder / 'edits.jsonl'}"


def write_texts(folder: Path) -> str:
    """Two prompts without images in a file. Returns the override that names it."""
    (folder / "texts.txt").write_text("a red ring\ntwo blue squares\n")
    return f"data.train={folder / 'texts.txt'}"


def run(folder: Path, checkpoint: Path, *words: str, recipe: str, resume: Path | None = None) -> Steps:
    """The steps of a recipe on a miniature. folder: its working directory.  resume: the run that is continued."""
    words = (f"model.path={checkpoint}", *words)
    with chdir(folder):
        result = small_runs.run(folder / "out", *words, recipe=recipe, small=(), resume=resume)
    return list(small_runs.steps(result.folder).values())


def check_joint_steps(steps: Steps, *stages: str, mismatch: float) -> None:
    """Stages of one model train at ratio 1. The first ratio is that of two forwards of the same batch: exactly 1. The
    rollout had other batches, and a cache: `mismatch` is what rounding makes of log-probs."""
    assert len(steps) == 2
    for step in steps:
        for stage in stages:
            assert step[f"{stage}/ratio_max_dev_first"] == 0
            assert step[f"{stage}/logp_mismatch_max"] <= mismatch
            assert step[f"{stage}/grad_norm"] > 0


def check_equal_steps(mine: Steps, its: Steps) -> None:
    """Two runs computed the same, bit for bit."""

    def computed(step: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in step.items() if not name.startswith("perf/")}

    assert list(map(computed, mine)) == list(map(computed, its))
