"""The report: curves, samples and one page in the run folder, while it runs and again whenever asked."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec

__all__ = ["unirl_trackers"]


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="report",
            summary="Curves, samples before and after training, and one static page in the run folder.",
            build="unirl.trackers.report.tracker:build",
            config="unirl.trackers.report.config:ReportConfig",
        )
    ]
