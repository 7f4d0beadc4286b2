"""Trackers: they show a run somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from ..types.event import Event
    from ..types.media import Media
    from ..types.track import Track

__all__ = ["RunInfo", "Tracker"]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts that a tracker gets at the start of a run."""

    name: str
    folder: Path
    plan_hash: str
    config: Mapping[str, Any]
    resumed_at: int | None = None


class Tracker(Protocol):
    """Shows a run somewhere. Build: `build(config) -> Tracker`. Driven by the events of the run.

    `unirl.core.observe.caption.captions` writes prompt, reward and truncation of samples as lines of text.
    """

    def start(self, run: RunInfo) -> None: ...
    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        """Show samples of a track; a kind of media that cannot be shown is left out.

        key: `train` or `eval`, and with several stages `train/<stage>`; parents come before their children.
        track: N samples with their media, on the CPU, without segment and conditions. Texts are whole: of any length
        and script, also empty. Samples of one parent are adjacent, and their `parent_ids` are equal.
        lineage: stage -> N media, what each sample descends from, root first; empty for a track made from prompts.
        """
        ...

    def event(self, event: Event) -> None:
        """Every event of the run, for those that show more than numbers."""
        ...

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None: ...
