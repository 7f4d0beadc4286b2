"""SwanLab as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="swanlab",
            summary="SwanLab, online or offline; a resumed run continues the same SwanLab run.",
            build="unirl.trackers.swanlab.tracker:build",
            config="unirl.trackers.swanlab.config:SwanlabConfig",
            trial={"mode": "offline"},
        )
    ]
