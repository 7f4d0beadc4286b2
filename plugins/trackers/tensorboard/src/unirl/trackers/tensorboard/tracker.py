"""The TensorBoard tracker: one writer under `<run folder>/tensorboard`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.utils.tensorboard.writer import SummaryWriter
from unirl.core.observe.caption import Caption
from unirl.core.roles import RunInfo
from unirl.core.specs.check import check_config
from unirl.core.types.array import Array
from unirl.core.types.event import Event

from .config import TensorboardConfig

__all__ = ["TensorboardTracker", "build", "image_grid"]

FLUSH_AT = ("evaluated", "checkpoint_saved")
"""Events after which a crash must not lose what was logged."""


def build(config: TensorboardConfig) -> TensorboardTracker:
    """The tracker of this config. Raises RecipeError for invalid counts."""
    check_config(config, key="tracker.tensorboard")
    return TensorboardTracker(config)


class TensorboardTracker:
    """Writes scalars by key, images as grids with captions, and completions, recipe and findings as text."""

    def __init__(self, config: TensorboardConfig) -> None:
        self._config = config
        self._open: SummaryWriter | None = None

    @property
    def _writer(self) -> SummaryWriter:
        assert self._open is not None, "start() comes first"
        return self._open

    def start(self, run: RunInfo) -> None:
        """Open a new event file. After a resume at step N the points past N of earlier files are hidden."""
        # TensorBoard drops earlier points at purge_step and later; step N itself was completed before the checkpoint.
        purge_step = None if run.resumed_at is None else run.resumed_at + 1
        self._open = SummaryWriter(
            log_dir=str(run.folder / "tensorboard"), purge_step=purge_step, flush_secs=self._config.flush_s
        )
        if run.resumed_at is None:
            recipe = json.dumps(run.config, indent=2, default=str).replace("\n", "\n    ")
            self._writer.add_text("run", f"**{run.name}**, plan `{run.plan_hash}`\n\n    {recipe}", 0)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def images(self, key: str, images: Array, captions: Sequence[str], *, step: int) -> None:
        """One grid image `<key>`, rows first, and its captions in the same order as the text `<key>/captions`."""
        if images.ndim != 4 or images.shape[1] != 3 or len(captions) != images.shape[0]:
            raise ValueError(
                f"images {key!r}: shape {tuple(images.shape)} with {len(captions)} captions; "
                "expected [N, 3, H, W] and one caption per image."
            )
        shown = min(self._config.max_images, int(images.shape[0]))
        if shown == 0:
            return
        self._writer.add_image(key, image_grid(images[:shown]), step)
        lines = [f"{number}. {caption}" for number, caption in enumerate(captions[:shown], start=1)]
        self._writer.add_text(f"{key}/captions", "\n".join(lines), step)

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        """The first texts as one text `<key>/texts`: reward, prompt and text of each, in their order."""
        if len(captions) != len(texts):
            raise ValueError(
                f"texts {key!r}: {len(texts)} with {len(captions)} captions; expected one caption per text."
            )
        shown = [
            _sample(number, text, Caption.parse(caption))
            for number, (text, caption) in enumerate(zip(texts[: self._config.max_texts], captions, strict=False), 1)
        ]
        if shown:
            self._writer.add_text(f"{key}/texts", "\n\n".join(shown), step)

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self._writer.add_text("findings", str(event.data["text"]), event.step)
        if event.kind in FLUSH_AT:
            self._writer.flush()

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def _sample(number: int, text: str, caption: Caption) -> str:
    """A text sample in Markdown, its prompt and text as they are."""
    reward = "" if caption.reward is None else f" reward {caption.reward:.2f}"
    cut = " truncated" if caption.is_truncated else ""
    return f"**{number}.{reward}{cut}**\n\n{_verbatim(caption.prompt)}\n\ntext:\n\n{_verbatim(text)}"


def _verbatim(text: str) -> str:
    """A block that Markdown shows letter by letter. Every kind of line end counts: a line at the margin ends it."""
    return "\n".join(f"    {line}" for line in text.splitlines()) if text.strip() else "*nothing*"


def image_grid(images: Array, *, gap: int = 2) -> Array:
    """Images side by side in a nearly square grid, row by row, on a grey ground.

    images: [N, 3, H, W] in [0, 1], N >= 1.  gap: pixels between neighbours and around.
    Returns uint8 [3, rows * (H + gap) + gap, columns * (W + gap) + gap], with columns = ceil(sqrt(N)).
    """
    number, _, height, width = images.shape
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    pixels = (images.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    grid = torch.full((3, rows * (height + gap) + gap, columns * (width + gap) + gap), 128, dtype=torch.uint8)
    for index in range(number):
        top = (index // columns) * (height + gap) + gap
        left = (index % columns) * (width + gap) + gap
        grid[:, top : top + height, left : left + width] = pixels[index]
    return grid
