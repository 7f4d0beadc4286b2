"""The report as a tracker: saves the samples, and rewrites the report at every evaluation and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from unirl.core.roles import RunInfo
from unirl.core.specs.check import check_config
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.track import Track

from .config import ReportConfig
from .media import MediaFolder
from .write import write_report

__all__ = ["ReportTracker", "build"]


def build(config: ReportConfig) -> ReportTracker:
    """The tracker of this config. Raises RecipeError for invalid counts."""
    check_config(config, key="tracker.report")
    return ReportTracker(config)


class ReportTracker:
    """Keeps no state: the report is made from the events and samples in the run folder, as `unirl report` does."""

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

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        # A parent came before its children, and what was saved of it is beside them.
        assert self._media is not None, "start() comes first"
        self._media.save(key, track, step=step)

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
