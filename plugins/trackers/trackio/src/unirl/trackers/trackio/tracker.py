"""The Trackio tracker: one Trackio run per run folder, resumed with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unirl.core.specs.check import check_config
from unirl.tracker_host.client_tracker import ClientTracker

from .config import TrackioConfig

__all__ = ["build"]


def build(config: TrackioConfig) -> ClientTracker:
    """The tracker of this config. Raises RecipeError for an invalid setting."""
    check_config(config, key="tracker.trackio")
    remote = (config.server_url, config.space_id, *map(os.environ.get, ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")))

    def variables(folder: Path) -> Mapping[str, str]:
        # Reports of usage are off, and a run that is logged into files does not ask the Hub who its user is.
        result = {"TRACKIO_DIR": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
        return result if any(remote) else {**result, "HF_HUB_OFFLINE": "1"}

    return ClientTracker(
        "trackio",
        "unirl.trackers.trackio.client:TrackioTrackerClient",
        config,
        max_images=config.max_images,
        max_texts=config.max_texts,
        init_timeout_s=config.init_timeout_s,
        variables=variables,
        secrets=("TRACKIO_WRITE_TOKEN", "HF_TOKEN", "TRACKIO_WEBHOOK_URL"),
    )
