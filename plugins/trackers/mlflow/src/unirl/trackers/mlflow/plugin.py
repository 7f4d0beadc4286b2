"""MLflow as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="mlflow",
            summary="MLflow, on a server or in the run folder; a resumed run continues the same MLflow run.",
            build="unirl.trackers.mlflow.tracker:build",
            config="unirl.trackers.mlflow.config:MlflowConfig",
        )
    ]
