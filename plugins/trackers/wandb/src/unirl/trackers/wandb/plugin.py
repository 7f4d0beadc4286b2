"""Weights & Biases as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="wandb",
            summary="Weights & Biases, online or offline; a resumed run continues the same W&B run.",
            build="unirl.trackers.wandb.tracker:build",
            config="unirl.trackers.wandb.config:WandbConfig",
            trial={"mode": "offline"},
        )
    ]
