"""Handing a run's events, numbers and samples to its trackers. A tracker that fails is reported once and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from ..errors import RunFailed
from ..roles import RunInfo, Tracker
from ..types.event import Event
from ..types.track import Status
from .caption import Caption
from .events import EventStream

if TYPE_CHECKING:
    from ..types.track import Track

__all__ = ["MAX_IMAGES", "MAX_TEXTS", "TakesTexts", "Trackers"]

MAX_IMAGES = 64
"""Images handed to trackers at once."""
MAX_TEXTS = 64
"""Texts handed to trackers at once. Each is whole: what is too long to show is for the tracker to say."""


@runtime_checkable
class TakesTexts(Protocol):
    """A tracker that shows text samples; those of before there were any have no such method."""

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None: ...


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
        """Show the first images and texts of a scored track, those that it has.

        A tracker that takes no texts is named in one `finding` of the run, and goes on with the rest.
        """
        if not self._trackers or track.rewards is None:
            return
        facts = zip(track.prompts, track.rewards, track.status, strict=True)
        captions = [str(Caption(prompt=p, reward=float(r), is_truncated=s is Status.TRUNCATED)) for p, r, s in facts]
        if track.images is not None:
            images = track.images[:MAX_IMAGES].detach().cpu()
            for name, tracker in list(self._trackers.items()):
                self._guarded(
                    name, lambda t=tracker: t.images(key, images, captions[: len(images)], step=step), step=step
                )
        if track.texts is not None:
            texts = list(track.texts[:MAX_TEXTS])
            for name, tracker in list(self._trackers.items()):
                self._texts(name, tracker, key, texts, captions[: len(texts)], step=step)

    def _texts(self, name: str, tracker: object, key: str, texts: list[str], captions: list[str], *, step: int) -> None:
        if isinstance(tracker, TakesTexts):
            self._guarded(name, lambda: tracker.texts(key, texts, captions, step=step), step=step)
            return
        text = (
            f"tracker.{name}: text samples are not shown there, because it has no method `texts`; the rest of the run "
            "is. A newer version of that tracker may have it; its author finds it in `unirl.core.roles.Tracker`."
        )
        self._events.finding(text, step=step, once=f"tracker.{name} takes no texts")

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
