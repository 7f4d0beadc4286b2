"""Handing a run's events, numbers and samples to its trackers. A tracker that fails is reported once and left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ..errors import RunFailed
from ..roles import RunInfo, Tracker
from ..types.event import Event
from ..types.track import Status
from .caption import Caption
from .events import EventStream

if TYPE_CHECKING:
    from ..types.track import Track

__all__ = ["MAX_SAMPLES", "Trackers"]

MAX_SAMPLES = 64
"""Samples handed to trackers at once. Texts are whole: what is too long to show is for the tracker to say."""


class Trackers:
    """The trackers of a run. Losing a dashboard must not lose the run: a failure becomes a `finding` event."""

    def __init__(self, trackers: Mapping[str, Tracker], events: EventStream) -> None:
        self._trackers = dict(trackers)
        self._events = events
        events.listen(self._on_event)

    def start(self, run: RunInfo) -> None:
        """Start every tracker. Raises RunFailed when one cannot start: that is seen best before the first step."""
        for name, tracker in self._trackers.items():
            try:
                tracker.start(run)
            except Exception as error:
                raise RunFailed(
                    f"tracker.{name}: could not start: {error}. Mend its settings or leave it out: `~tracker.{name}`."
                ) from error

    def samples(self, key: str, track: Track, *, step: int) -> None:
        """Show the first samples of a scored track that was decoded."""
        if not self._trackers or track.rewards is None or track.media is None:
            return
        media = track.media.select(range(min(MAX_SAMPLES, track.num_rows)))
        # Wherever they lie.
        media = media.mapped(lambda array: array.detach().cpu())
        facts = list(zip(track.inputs.prompts, track.rewards, track.status, strict=True))[: media.num_rows]
        captions = [str(Caption(prompt=p, reward=float(r), is_truncated=s is Status.TRUNCATED)) for p, r, s in facts]
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda t=tracker: t.samples(key, media, captions, step=step), step=step)

    def finish(self, status: Literal["done", "stopped", "failed"], *, step: int) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda t=tracker: t.finish(status), step=step)

    def _on_event(self, event: Event) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda t=tracker: _show(t, event), step=event.step)

    def _guarded(self, name: str, call: object, *, step: int) -> None:
        assert callable(call)
        try:
            call()
        except Exception as error:  # noqa: BLE001 - recorded as a finding, and the tracker is left out
            self._trackers.pop(name, None)
            text = f"tracker.{name} failed and is off from here: {type(error).__name__}: {error}"
            self._events.finding(text, step=step)


def _show(tracker: Tracker, event: Event) -> None:
    if event.kind in ("step", "evaluated"):
        prefix = "eval/" if event.kind == "evaluated" else ""
        numbers = {prefix + key: value for key, value in event.data["metrics"].items()}
        numbers |= {f"seconds/{key}": value for key, value in event.data.get("phases", {}).items()}
        tracker.log(numbers, step=event.step)
    tracker.event(event)
