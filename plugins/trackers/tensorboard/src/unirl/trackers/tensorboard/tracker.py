"""The TensorBoard tracker: one writer under `<run folder>/tensorboard`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.tensorboard.writer import SummaryWriter
from unirl.core.observe.caption import captions
from unirl.core.roles import RunInfo
from unirl.core.specs.check import check_config
from unirl.core.types.array import Array
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.track import Status, Track
from unirl.tracker_host.animation import gif

from tensorboard.compat.proto import summary_pb2

from .config import TensorboardConfig

__all__ = ["TensorboardTracker", "build", "image_grid"]

Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue] - its classes are made on import
FLUSH_AT = ("evaluated", "checkpoint_saved")
"""Events after which a crash must not lose what was logged."""
STRIP = 6
"""Most frames of a video in a strip."""


def build(config: TensorboardConfig) -> TensorboardTracker:
    """The tracker of this config. Raises RecipeError for invalid counts."""
    check_config(config, key="tracker.tensorboard")
    return TensorboardTracker(config)


class TensorboardTracker:
    """Writes scalars by key, images and frames of videos as grids with captions, animations of videos, and
    completions, recipe and findings as text."""

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

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        """Images as one grid `<key>`, rows first, each with the images that it was made from at its left; videos as
        strips of frames in such a grid, and as the animated grid `<key>/animation`. The text `<key>` has their captions
        in the same order or, with parents, reward, prompt and parents of each. Texts as one text `<key>/texts`: reward,
        prompt, parents and text of each."""
        media = track.media
        if media is None or media.kind == "audio" or not track.num_rows:
            return
        limit = self._config.max_texts if media.kind == "text" else self._config.max_images
        rows = range(min(limit, track.num_rows))
        if media.kind == "text":
            blocks = [_block(track, row, {**lineage, "text": media}) for row in rows]
            self._writer.add_text(f"{key}/texts", "\n\n".join(blocks), step)
            return
        shown = [media.array(row) for row in rows]
        parents = [parent for parent in lineage.values() if parent.kind in ("image", "video")]
        cells = [_beside([_still(each, row) for each in (*parents, media)]) for row in rows]
        self._writer.add_image(key, image_grid(cells), step)
        if media.rate:
            self._animation(f"{key}/animation", shown, rate=media.rate, step=step)
        if lineage:
            self._writer.add_text(key, "\n\n".join(_block(track, row, lineage) for row in rows), step)
        else:
            lines = [f"{row + 1}. {caption}" for row, caption in enumerate(captions(track.select(rows)))]
            self._writer.add_text(key, "\n".join(lines), step)

    def _animation(self, key: str, videos: Sequence[Array], *, rate: float, step: int) -> None:
        """The videos as one animated GIF; a shorter one stays at its last frame."""
        # `add_video` would need moviepy to encode the same.
        grids = [
            image_grid([video[min(at, len(video) - 1)] for video in videos]) for at in range(max(map(len, videos)))
        ]
        frames = [grid.movedim(0, -1).contiguous().numpy() for grid in grids]
        height, width, _ = frames[0].shape
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif(frames, rate=rate))
        writer = self._writer.file_writer
        assert writer is not None, "open until finish()"
        writer.add_summary(Summary(value=[Summary.Value(tag=key, image=image)]), step)

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self._writer.add_text("findings", str(event.data["text"]), event.step)
        if event.kind in FLUSH_AT:
            self._writer.flush()

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def _block(track: Track, row: int, shown: Mapping[str, Media]) -> str:
    """A sample in Markdown: its number, reward and prompt, and the texts of `shown` as they are."""
    reward = "" if track.rewards is None else f" reward {float(track.rewards[row]):.2f}"
    cut = " truncated" if track.status[row] is Status.TRUNCATED else ""
    texts = {name: media.texts[row] for name, media in shown.items() if media.kind == "text"}
    parts = [f"**{row + 1}.{reward}{cut}**", _verbatim(track.inputs.prompts[row])]
    return "\n\n".join([*parts, *(f"{name}:\n\n{_verbatim(text)}" for name, text in texts.items())])


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


def _still(media: Media, row: int) -> Array:
    """[3, H, W]: an image, or the strip of a video."""
    return _strip(media.array(row)) if media.kind == "video" else media.array(row)


def _beside(images: Sequence[Array]) -> Array:
    """One picture of several, side by side on white."""
    if len(images) == 1:
        return images[0]
    height = max(int(image.shape[1]) for image in images)
    pad = torch.nn.functional.pad
    return torch.cat([pad(image.float(), (0, 0, 0, height - int(image.shape[1])), value=1.0) for image in images], -1)


def _strip(video: Array) -> Array:
    """[3, H, n * W]: at most STRIP frames of a video [F, 3, H, W], evenly spread, side by side."""
    spread = [round(at * (len(video) - 1) / (STRIP - 1)) for at in range(STRIP)]
    return torch.cat([video[at] for at in dict.fromkeys(spread)], dim=-1)
