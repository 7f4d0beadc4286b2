"""TensorBoard as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="tensorboard",
            summary="Scalars, image grids, completions and the recipe as TensorBoard event files in the run folder.",
            build="unirl.trackers.tensorboard.tracker:build",
            config="unirl.trackers.tensorboard.config:TensorboardConfig",
        )
    ]
