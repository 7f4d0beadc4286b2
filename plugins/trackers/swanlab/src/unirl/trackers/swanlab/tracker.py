"""The SwanLab tracker: one SwanLab run per run folder, resumed with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unirl.core.specs.check import check_config
from unirl.tracker_host.client_tracker import ClientTracker

from .config import SwanlabConfig

__all__ = ["build"]


def build(config: SwanlabConfig) -> ClientTracker:
    """The tracker of this config. Raises RecipeError for an invalid setting."""
    check_config(config, key="tracker.swanlab")

    def variables(folder: Path) -> Mapping[str, str]:
        return {
            # An older name of the same setting, which would not win over the newer one.
            **({} if "SWANLAB_LOGDIR" in os.environ else {"SWANLAB_LOG_DIR": str(folder)}),
            "SWANLAB_INTERACTIVE": "false",
            "SWANLAB_PROBE_MONITOR": "false",
            "SWANLAB_TERMINAL_PROXY_TYPE": "none",
        }

    return ClientTracker(
        "swanlab",
        "unirl.trackers.swanlab.client:SwanlabTrackerClient",
        config,
        max_images=config.max_images,
        max_texts=config.max_texts,
        init_timeout_s=config.init_timeout_s,
        run_id=config.run_id or os.environ.get("SWANLAB_RUN_ID"),
        variables=variables,
        secrets=("SWANLAB_API_KEY", "SWANLAB_WEBHOOK", "SWANLAB_WEBHOOK_VALUE"),
    )
