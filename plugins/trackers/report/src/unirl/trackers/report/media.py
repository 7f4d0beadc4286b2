"""Images of a run: PNG files under `<run folder>/media`, with an index that says what each one is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from unirl.core.array import Array
from unirl.core.events import EventStream, read_events

__all__ = ["ImageBatch", "MediaFolder", "Sample", "read_media"]

MEDIA = "media"
INDEX = "index.jsonl"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One saved image."""

    file: Path
    prompt: str
    reward: float | None
    """None when the caption names none."""


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """The images that arrived at once under one key."""

    key: str
    step: int
    samples: tuple[Sample, ...]
    num_left_out: int
    """Images of the batch that were not saved."""


class MediaFolder:
    """Writes images as they arrive. A resumed run goes on in the same folder and index."""

    def __init__(self, folder: Path, *, max_images: int, resumed_at: int | None) -> None:
        self._folder = folder / MEDIA
        self._max_images = max_images
        if resumed_at is not None:
            self._note("run_resumed", step=resumed_at)

    def save(self, key: str, images: Array, captions: Sequence[str], *, step: int) -> None:
        """Save the first `max_images` as `media/step-000010/<key>-00.png`, then their line of the index.

        images: [N, 3, H, W] in [0, 1].  captions: N, each `<prompt> | reward <number>`.
        Raises ValueError for other shapes or a number of captions that is not N.
        """
        if images.ndim != 4 or images.shape[1] != 3 or len(captions) != images.shape[0]:
            raise ValueError(
                f"images {key!r}: shape {tuple(images.shape)} with {len(captions)} captions was given; "
                "[N, 3, H, W] and one caption an image are needed."
            )
        shown = images[: self._max_images].detach().float().clamp(0, 1)
        pixels = (shown * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        folder = self._folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]", "-", key)
        files: list[str] = []
        for number, picture in enumerate(pixels):
            file = folder / f"{stem}-{number:02d}.png"
            Image.fromarray(picture).save(file)
            files.append(f"{folder.name}/{file.name}")
        self._note(
            "images",
            step=step,
            key=key,
            files=files,
            captions=list(captions[: len(files)]),
            num_left_out=len(captions) - len(files),
        )

    def _note(self, kind: str, *, step: int, **data: Any) -> None:
        """One line of the index, safe on disk when this returns."""
        index = EventStream(self._folder / INDEX)
        try:
            index.emit(kind, step=step, **data)
        finally:
            index.close()


def read_media(folder: Path) -> list[ImageBatch]:
    """The image batches of a run, by step; those that a resumed run made again count once. Empty when there are none.

    Raises ValueError for a damaged index or a missing file.
    """
    index = folder / MEDIA / INDEX
    if not index.exists():
        return []
    batches: dict[tuple[int, str], ImageBatch] = {}
    for event in read_events(index):
        if event.kind == "run_resumed":
            batches = {at: batch for at, batch in batches.items() if batch.step <= event.step}
        elif event.kind == "images":
            try:
                key, files, captions = event.data["key"], event.data["files"], event.data["captions"]
                samples = tuple(_sample(index, *pair) for pair in zip(files, captions, strict=True))
                left_out = int(event.data["num_left_out"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"{index}: the images of step {event.step} lack {error}.") from error
            batches[event.step, key] = ImageBatch(key=key, step=event.step, samples=samples, num_left_out=left_out)
    return sorted(batches.values(), key=lambda batch: (batch.step, batch.key))


def _sample(index: Path, name: str, caption: str) -> Sample:
    file = index.parent / name
    if not file.is_file():
        raise ValueError(f"{index}: it names {name}, which is missing.")
    prompt, _, last = caption.rpartition(" | reward ")
    try:
        return Sample(file=file, prompt=prompt, reward=float(last))
    except ValueError:
        # A caption without a reward, or a prompt that has the words.
        return Sample(file=file, prompt=caption, reward=None)
