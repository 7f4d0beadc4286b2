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
from unirl.core.types.media import Media

from .config import TensorboardConfig

__all__ = ["TensorboardTracker", "build", "image_grid"]

FLUSH_AT = ("evaluated", "checkpoint_saved")
"""Events after which a crash must not lose what was logged."""
STRIP = 6
"""Most frames of a video that are shown. TensorBoard's own videos need moviepy."""


def build(config: TensorboardConfig) -> TensorboardTracker:
    """The tracker of this config. Raises RecipeError for invalid counts."""
    check_config(config, key="tracker.tensorboard")
    return TensorboardTracker(config)


class TensorboardTracker:
    """Writes scalars by key, images and frames of videos as grids with captions, and completions, recipe and findings
    as text."""

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

    def samples(self, key: str, media: Media, captions: Sequence[str], *, step: int) -> None:
        """Images as one grid `<key>`, rows first, videos as strips of frames in such a grid, and their captions in the
        same order as the text `<key>/captions`. Texts as one text `<key>/texts`: reward, prompt and text of each."""
        if len(captions) != len(media):
            raise ValueError(f"samples {key!r}: got {len(captions)} captions for {len(media)}, expected one of each.")
        if media.kind == "text":
            self._texts(key, media.texts[: self._config.max_texts], captions, step=step)
        elif media.kind != "audio":
            shown = media.arrays[: self._config.max_images]
            self._images(key, [_strip(each) if media.kind == "video" else each for each in shown], captions, step=step)

    def _images(self, key: str, images: Sequence[Array], captions: Sequence[str], *, step: int) -> None:
        if not images:
            return
        self._writer.add_image(key, image_grid(images), step)
        lines = [f"{number}. {caption}" for number, caption in enumerate(captions[: len(images)], start=1)]
        self._writer.add_text(f"{key}/captions", "\n".join(lines), step)

    def _texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        shown = [
            _sample(number, text, Caption.parse(caption))
            for number, (text, caption) in enumerate(zip(texts, captions, strict=False), 1)
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


def image_grid(images: Sequence[Array], *, gap: int = 2) -> Array:
    """Images side by side in a nearly square grid, row by row, on a grey ground.

    images: N >= 1 of [3, H, W] in [0, 1], in cells of the largest height and width.
    gap: pixels between neighbours and around.
    Returns uint8 [3, rows * (H + gap) + gap, columns * (W + gap) + gap], with columns = ceil(sqrt(N)).
    """
    height, width = (max(int(image.shape[dim]) for image in images) for dim in (1, 2))
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    grid = torch.full((3, rows * (height + gap) + gap, columns * (width + gap) + gap), 128, dtype=torch.uint8)
    for index, image in enumerate(images):
        top = (index // columns) * (height + gap) + gap
        left = (index % columns) * (width + gap) + gap
        pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
        grid[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return grid


def _strip(video: Array) -> Array:
    """[3, H, n * W]: at most STRIP frames of a video [F, 3, H, W], evenly spread, side by side."""
    spread = [round(at * (len(video) - 1) / (STRIP - 1)) for at in range(STRIP)]
    return torch.cat([video[at] for at in dict.fromkeys(spread)], dim=-1)
