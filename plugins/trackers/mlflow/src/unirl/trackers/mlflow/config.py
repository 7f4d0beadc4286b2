"""Settings of the MLflow tracker."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.limits import limit
from unirl.core.specs.part_config import PartConfig

__all__ = ["MlflowConfig"]


@dataclass
class MlflowConfig(PartConfig):
    """Settings left empty are MLflow's own environment variables, then a default."""

    tracking_uri: str = ""
    """Server (`http://127.0.0.1:5000`) or database (`sqlite:////data/mlflow.db`). Empty takes `MLFLOW_TRACKING_URI`,
    else `mlflow/mlflow.db` in the run folder."""
    experiment: str = ""
    """MLflow experiment of the run; created if it does not exist. Empty takes `MLFLOW_EXPERIMENT_ID` or
    `MLFLOW_EXPERIMENT_NAME`, else `unirl`."""
    name: str = ""
    """Display name of the run; empty takes `run.name`."""
    run_id: str = ""
    """Id of an MLflow run to continue; empty takes `MLFLOW_RUN_ID`, else a new run. It is stored in the run folder, so
    a resumed run does not need it."""
    tags: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Tags of the run, name and value."""
    notes: str = ""
    """Description of the run, in Markdown."""
    max_images: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images or videos logged per key and step."""
    max_texts: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions logged per key and step, in full."""
    init_timeout_s: float = limit(90.0, above=0)
    """Maximum wait for MLflow at the start of a run, in seconds."""
