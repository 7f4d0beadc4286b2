"""The MLflow tracker: one MLflow run per run folder, resumed with it."""

from __future__ import annotations

import os

from unirl.core.specs.check import check_config
from unirl.tracker_host.client_tracker import ClientTracker

from .config import MlflowConfig

__all__ = ["build"]


def build(config: MlflowConfig) -> ClientTracker:
    """The tracker of this config. Raises RecipeError for an invalid setting."""
    check_config(config, key="tracker.mlflow")
    return ClientTracker(
        "mlflow",
        "unirl.trackers.mlflow.client:MlflowTrackerClient",
        config,
        max_images=config.max_images,
        max_texts=config.max_texts,
        init_timeout_s=config.init_timeout_s,
        run_id=config.run_id or os.environ.get("MLFLOW_RUN_ID"),
        # MLflow reports to its makers unless it is told not to.
        variables=lambda folder: {"MLFLOW_DISABLE_TELEMETRY": "true"},
        secrets=("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    )
