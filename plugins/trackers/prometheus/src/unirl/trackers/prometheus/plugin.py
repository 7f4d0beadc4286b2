"""Prometheus as a tracker."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import Gap, TrackerSpec

__all__ = ["unirl_trackers"]

KEEPS_NOTHING = "It serves the newest numbers while the run lasts and writes none; the scraper keeps them."
OF_FILES = (
    "a-tracker-may-join-when-a-run-is-resumed",
    "a-whole-run-is-accepted",
    "every-number-that-is-logged-is-kept",
    "every-text-that-is-shown-is-kept",
    "non-finite-numbers-are-accepted",
    "odd-names-and-long-texts-are-accepted",
    "resuming-loses-nothing",
    "two-runs-in-one-process-do-not-mix",
)
"""Claims that look for what a tracker leaves in the run folder."""


@hookimpl
def unirl_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(
            name="prometheus",
            summary="Numbers, phase times and findings of a running run for Prometheus to scrape.",
            build="unirl.trackers.prometheus.tracker:build",
            config="unirl.trackers.prometheus.config:PrometheusConfig",
            trial={"port": 0},
            gaps=tuple(Gap(claim=claim, reason=KEEPS_NOTHING) for claim in OF_FILES),
        )
    ]
