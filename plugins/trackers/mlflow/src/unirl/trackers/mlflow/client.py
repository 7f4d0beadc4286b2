"""MLflow's client, for one run. Used in a separate process."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from PIL import Image
from unirl.core.roles import RunInfo
from unirl.tracker_host.animation import gif
from unirl.tracker_host.shown import Shown

from mlflow.entities import Experiment, Metric, Param, RunTag
from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_TRACKING_URI
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from .config import MlflowConfig

__all__ = ["MlflowTrackerClient"]

STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_METRICS, MAX_PARAMS, MAX_KEY = 1000, 100, 250
"""Of MLflow: metrics and params of one request, characters of a key."""


class MlflowTrackerClient:
    """A `unirl.tracker_host.client_tracker.TrackerClient`.

    Numbers are metrics by step, settings are params, images are MLflow's images by key and step. Prompts, texts and
    rewards are a table, `samples/<key>/step-000010.json`, with the animations of videos beside it.
    """

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._findings: dict[int, int] = {}
        self._resumed_steps: dict[str, set[int]] | None = None
        """Metric -> its steps that an earlier session logged; None in a run that was not resumed."""

    def start(self, run: RunInfo, *, run_id: str | None) -> str:
        own = run.folder.absolute() / "mlflow"
        uri = self._config.tracking_uri or MLFLOW_TRACKING_URI.get()
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{own / 'mlflow.db'}")
        if run_id is None:
            self._id = self._new_run(run, artifacts=None if uri else (own / "artifacts").as_uri())
        else:
            self._id = self._client.get_run(run_id).info.run_id
            self._client.update_run(run_id, status="RUNNING")
            self._resumed_steps = {}
        return self._id

    def _new_run(self, run: RunInfo, *, artifacts: str | None) -> str:
        notes = {"mlflow.note.content": self._config.notes} if self._config.notes else {}
        result = self._client.create_run(
            self._experiment(artifacts),
            run_name=self._config.name or run.name,
            tags={"unirl.plan_hash": run.plan_hash, "unirl.folder": str(run.folder), **notes, **self._config.tags},
        ).info.run_id
        params = [Param(_key(key), value) for key, value in _flat(run.config)]
        for at in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(result, params=params[at : at + MAX_PARAMS])
        # Whole: MLflow cuts long params.
        self._client.log_text(result, json.dumps(dict(run.config), indent=2, default=str), "recipe.json")
        return result

    def _experiment(self, artifacts: str | None) -> str:
        """Id of the experiment, which is made if there is none."""
        if not self._config.experiment and (chosen := MLFLOW_EXPERIMENT_ID.get()):
            return chosen
        name = self._config.experiment or MLFLOW_EXPERIMENT_NAME.get() or "unirl"
        result: Experiment | None = self._client.get_experiment_by_name(name)
        if result is None:
            try:
                return self._client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                # Another run may have made it in between.
                result = self._client.get_experiment_by_name(name)
                if result is None:
                    raise error
        return result.experiment_id

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        now = round(time.time() * 1000)
        new = [
            Metric(key, value, now, step)
            for key, value in ((_key(key), value) for key, value in metrics.items())
            if not self._has(key, step)
        ]
        for at in range(0, len(new), MAX_METRICS):
            self._client.log_batch(self._id, metrics=new[at : at + MAX_METRICS])

    def _has(self, key: str, step: int) -> bool:
        """Whether an earlier session logged this metric at this step: MLflow would keep both values."""
        if self._resumed_steps is None:
            return False
        if key not in self._resumed_steps:
            history = self._client.get_metric_history(self._id, key)
            self._resumed_steps[key] = {metric.step for metric in history}
        return step in self._resumed_steps[key]

    def show(self, shown: Shown) -> None:
        folder = f"samples/{_key(shown.key)}"
        table = f"{folder}/{'texts-' if shown.kind == 'text' else ''}step-{shown.step:06d}.json"
        if self._resumed_steps is not None and any(
            file.path == table for file in self._client.list_artifacts(self._id, folder)
        ):
            return
        if shown.kind == "image":
            for row, image in enumerate(shown.media):
                # The key that MLflow lets images have, one for each slider of its page.
                key = re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", f"{shown.key}/{row:02d}")
                self._client.log_image(self._id, Image.fromarray(image), key=key, step=shown.step)
        elif shown.kind == "video":
            assert shown.rate is not None
            with TemporaryDirectory() as temporary:
                for row, video in enumerate(shown.media):
                    file = Path(temporary) / f"step-{shown.step:06d}-{row:02d}.gif"
                    file.write_bytes(gif(video, rate=shown.rate))
                self._client.log_artifacts(self._id, temporary, folder)
        # Last: a table is there when all of its samples are.
        content = json.dumps({"columns": list(shown.columns), "data": [list(row) for row in shown.rows]})
        self._client.log_text(self._id, content, table)

    def finding(self, text: str, *, step: int) -> None:
        number = self._findings[step] = self._findings.get(step, 0) + 1
        self._client.log_batch(self._id, tags=[RunTag(f"finding.step-{step:06d}.{number}", text)])

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        self._client.log_batch(self._id, tags=[RunTag("unirl.status", status)])
        self._client.set_terminated(self._id, STATUS[status])


def _key(key: str) -> str:
    """The key with `_` for characters that MLflow does not allow in one."""
    return re.sub(r"[^/\w.\- :]", "_", key).strip("/")[:MAX_KEY]


def _flat(section: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """`run.max_steps` -> `4` and so on; lists and empty sections are one value."""
    result: list[tuple[str, str]] = []
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            result += _flat(value, f"{path}{key}.")
        else:
            result.append((f"{path}{key}", str(value)))
    return result
