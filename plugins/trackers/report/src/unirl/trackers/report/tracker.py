"""The report as a tracker: saves the samples, and rewrites the report at every evaluation and at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from unirl.core.array import Array
from unirl.core.errors import RecipeError
from unirl.core.events import Event
from unirl.core.roles import RunInfo

from .config import ReportConfig
from .media import MediaFolder
from .write import write_report

__all__ = ["ReportTracker", "build"]


def build(config: ReportConfig) -> ReportTracker:
    """The tracker of this config. Raises RecipeError for counts that cannot be."""
    for field in dataclasses.fields(ReportConfig):
        value = getattr(config, field.name)
        if isinstance(value, int) and value < 1:
            raise RecipeError(
                f"tracker.report.{field.name}: {value} was asked for; it must be 1 or more. "
                "run.media_every=0 sends no training samples at all."
            )
    return ReportTracker(config)


class ReportTracker:
    """Keeps nothing: the report is made from the events and samples in the run folder, as `unirl report` does."""

    def __init__(self, config: ReportConfig) -> None:
        self._config = config
        self._folder: Path | None = None
        self._media: MediaFolder | None = None
        self._is_announced = False

    def start(self, run: RunInfo) -> None:
        self._folder = run.folder
        self._media = MediaFolder(
            run.folder,
            max_images=self._config.max_images,
            max_texts=self._config.max_texts,
            resumed_at=run.resumed_at,
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Nothing to keep: the same numbers are in the `step` and `evaluated` events."""

    def images(self, key: str, images: Array, captions: Sequence[str], *, step: int) -> None:
        assert self._media is not None, "start() comes first"
        self._media.save_images(key, images, captions, step=step)

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        assert self._media is not None, "start() comes first"
        self._media.save_texts(key, texts, captions, step=step)

    def event(self, event: Event) -> None:
        self._is_announced = self._is_announced or event.kind in ("run_started", "run_resumed")
        if event.kind == "evaluated":
            assert self._folder is not None, "start() comes first"
            write_report(self._folder, config=self._config, is_running=True)

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        assert self._folder is not None, "start() comes first"
        # Of a run that failed before it began there is nothing to show.
        if self._is_announced:
            write_report(self._folder, config=self._config)
