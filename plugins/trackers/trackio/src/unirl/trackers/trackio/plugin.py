"""Trackio as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="trackio",
            summary="Trackio, in the run folder, on a server or a Space; a resumed run continues the same Trackio run.",
            build="unirl.trackers.trackio.tracker:build",
            config="unirl.trackers.trackio.config:TrackioConfig",
        )
    ]
