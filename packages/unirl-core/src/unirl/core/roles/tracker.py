"""What launchers and trackers do: they make the parts of a run, and show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from ..types.event import Event
    from ..types.media import Media

__all__ = ["RunInfo", "Tracker"]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told at the start."""

    name: str
    folder: Path
    plan_hash: str
    config: Mapping[str, Any]
    resumed_at: int | None = None


class Tracker(Protocol):
    """Shows a run somewhere. Build: `build(config) -> Tracker`. Driven by the events of the run.

    Samples arrive with one caption each, which `unirl.core.observe.caption.Caption` writes and reads: the prompt, the
    reward, and whether a length limit ended the sample.
    """

    def start(self, run: RunInfo) -> None: ...
    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def samples(self, key: str, media: Media, captions: Sequence[str], *, step: int) -> None:
        """media: N, on the CPU, of the kind that the track has; a kind that cannot be shown is left out.  captions: N.

        Texts are whole: of any length and script, also empty.
        """
        ...

    def event(self, event: Event) -> None:
        """Every event of the run, for those that show more than numbers."""
        ...

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None: ...
