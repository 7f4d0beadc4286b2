"""Handing a run's events, numbers and samples to its trackers. A tracker that fails is reported once and left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from ..errors import RunFailed
from ..roles import RunInfo, Tracker
from ..types.event import Event
from .caption import transcript
from .events import EventStream

if TYPE_CHECKING:
    from ..types.media import Media
    from ..types.rollout import Rollout
    from ..types.track import Track

__all__ = ["MAX_SAMPLES", "Trackers"]

MAX_SAMPLES = 64
"""Samples handed to trackers at once. Texts are whole: what is too long to show is for the tracker to say."""


class Trackers:
    """The trackers of a run. Losing a dashboard must not lose the run: a failure becomes a `finding` event."""

    def __init__(self, trackers: Mapping[str, Tracker], events: EventStream) -> None:
        self._built = dict(trackers)
        self._trackers: dict[str, Tracker] = {}
        """Those that started, and have not failed."""
        self._events = events
        events.listen(self._on_event)

    def start(self, run: RunInfo) -> None:
        """Start every tracker. Raises RunFailed when one cannot start: that is seen best before the first step."""
        for name, tracker in self._built.items():
            try:
                tracker.start(run)
            except Exception as error:
                raise RunFailed(
                    f"tracker.{name}: could not start: {error}. Mend its settings or leave it out: `~tracker.{name}`."
                ) from error
            self._trackers[name] = tracker

    def samples(self, key: str, rollout: Rollout, *, step: int) -> None:
        """Show the first samples of each decoded track of a scored rollout, children beside their parents."""
        tracks = rollout.tracks
        if not self._trackers or all(track.rewards is None for track in tracks.values()):
            return
        shown: dict[str, Track] = {}
        for name in sorted(tracks, key=lambda name: len(_ancestors(tracks, name))):
            track = tracks[name]
            if track.media is None or (track.parent_track is not None and track.parent_track not in shown):
                continue
            shown[name] = _first(track, None if track.parent_track is None else shown[track.parent_track])
            lineage = _lineage(shown, name)
            where = f"{key}/{name}" if len(tracks) > 1 else key
            for by, tracker in list(self._trackers.items()):
                self._guarded(by, partial(tracker.samples, where, shown[name], step=step, lineage=lineage), step=step)

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


def _first(track: Track, parent: Track | None) -> Track:
    """The first samples of a decoded track; of a child, those whose parents are shown."""
    known = None if parent is None else set(parent.sample_ids)
    parents = cast("tuple[str, ...]", track.parent_ids)
    rows = [row for row in range(track.num_rows) if known is None or parents[row] in known][:MAX_SAMPLES]
    # What is trained on may be large, and lie in other processes.
    light = dataclasses.replace(track, segment=None, conditions={}, media=None).select(rows)
    media = cast("Media", track.media).select(rows)
    if light.turns is not None:
        media = dataclasses.replace(media, values=tuple(transcript(turns) for turns in light.turns))
    return dataclasses.replace(light, media=media.mapped(lambda array: array.detach().cpu()))


def _ancestors(tracks: Mapping[str, Track], name: str) -> list[str]:
    """Tracks that this one descends from, its parent first."""
    result: list[str] = []
    while (parent := tracks[name].parent_track) is not None:
        result.append(parent)
        name = parent
    return result


def _lineage(tracks: Mapping[str, Track], name: str) -> dict[str, Media]:
    """Ancestor -> its media, one for each sample of the track, the root first."""
    result: dict[str, Media] = {}
    ids = tracks[name].parent_ids
    for ancestor in _ancestors(tracks, name):
        parent = tracks[ancestor]
        place = {sample: row for row, sample in enumerate(parent.sample_ids)}
        rows = [place[sample] for sample in cast("tuple[str, ...]", ids)]
        ids = None if parent.parent_ids is None else tuple(parent.parent_ids[row] for row in rows)
        result = {ancestor: cast("Media", parent.media).select(rows), **result}
    return result


def _show(tracker: Tracker, event: Event) -> None:
    if event.kind in ("step", "evaluated"):
        prefix = "eval/" if event.kind == "evaluated" else ""
        numbers = {prefix + key: value for key, value in event.data["metrics"].items()}
        numbers |= {f"seconds/{key}": value for key, value in event.data.get("phases", {}).items()}
        tracker.log(numbers, step=event.step)
    tracker.event(event)
