"""What launchers and trackers do: they make the parts of a run, and show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..types.array import Array

if TYPE_CHECKING:
    from ..types.event import Event

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
    reward, and whether a length limit ended the sample. A tracker of before there were text samples, without `texts`,
    still runs: it gets everything else, and the run says once, as a finding, that its texts are not shown there.
    """

    def start(self, run: RunInfo) -> None: ...
    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def images(self, key: str, images: Array, captions: Sequence[str], *, step: int) -> None:
        """images: [N, 3, H, W] fp32 in [0, 1].  captions: N."""
        ...

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        """texts: N, what the model wrote; of any length and script, also empty.  captions: N."""
        ...

    def event(self, event: Event) -> None:
        """Every event of the run, for those that show more than numbers."""
        ...

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None: ...
