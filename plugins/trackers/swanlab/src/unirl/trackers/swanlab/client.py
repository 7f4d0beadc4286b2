"""SwanLab's client, for one run. Used in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from unirl.core.roles import RunInfo
from unirl.tracker_host.animation import gif
from unirl.tracker_host.client_process import TrackerFailed
from unirl.tracker_host.shown import Shown

import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
from swanlab.sdk.internal.pkg import console
from swanlab.sdk.internal.settings import create_settings

from .config import SwanlabConfig

__all__ = ["SwanlabTrackerClient"]

STATES: Mapping[str, Literal["success", "aborted", "crashed"]] = {
    "done": "success",
    "stopped": "aborted",
    "failed": "crashed",
}
LOSSES = ("skipping", "skipped", "refusing", "Failed to")
"""Words of SwanLab's warnings that say that something is not logged."""


class SwanlabTrackerClient:
    """A `unirl.tracker_host.client_tracker.TrackerClient`.

    Numbers are logged by step; images and videos with their captions under `<key>`, texts under `<key>/texts`. Findings
    are in the settings of the run.
    """

    def __init__(self, config: SwanlabConfig) -> None:
        self._config = config
        self._findings: list[str] = []
        self._problems: list[str] = []
        self._known: set[tuple[str, int]] = set()
        """Key and step of what earlier sessions of this run wrote here."""
        # SwanLab raises nothing once a run has begun: what it loses it prints.
        console.error = self._watched(console.error, ())
        console.warning = self._watched(console.warning, LOSSES)

    def _watched(self, shown: Callable[..., None], losses: Sequence[str]) -> Callable[..., None]:
        """A function that prints, and keeps the text if it has one of these words, or in any case without any."""

        def watched(*words: Any, **options: Any) -> None:
            text = " ".join(map(str, words or options.get("console_args", ())))
            if not losses or any(loss in text for loss in losses):
                self._problems.append(text)
            shown(*words, **options)

        return watched

    def _check(self) -> None:
        """Raise TrackerFailed for what went wrong since the last call."""
        if self._problems:
            raise TrackerFailed(" ".join(self._problems))

    def start(self, run: RunInfo, *, run_id: str | None) -> str:
        own, config = create_settings(), self._config
        if run_id is not None:
            for file in sorted(own.log_dir.glob(f"run-*/run-{run_id}.swanlab")):
                self._known |= _logged(str(file))
        try:
            self._run = swanlab.init(
                mode=config.mode,  # type: ignore[arg-type] - one of them, as its limit says
                project=config.project or own.project.name or "unirl",
                workspace=config.workspace or None,
                name=config.name or own.experiment.name or run.name,
                tags=config.tags or None,
                description=config.notes or None,
                id=run_id,
                resume=None if run_id is None else "allow",
                config={**run.config, "plan_hash": run.plan_hash},
            )
        except Exception as error:
            mode = config.mode or own.mode
            raise TrackerFailed(
                f"mode {mode!r}, server {own.api_host}: SwanLab says: {str(error).rstrip('.')}. "
                'Check the network and "swanlab login", or set mode=offline and upload later with "swanlab sync".'
            ) from error
        self._check()
        return self._run.id

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        new = {key: value for key, value in metrics.items() if (key, step) not in self._known}
        if new:
            self._run.log(new, step=step)
        self._check()

    def show(self, shown: Shown) -> None:
        pairs = zip(shown.media, shown.captions, strict=True)
        if shown.kind == "text":
            texts = [swanlab.Text(text, caption=caption) for text, caption in pairs]
            self.log({f"{shown.key}/texts": texts}, step=shown.step)
        elif shown.rate is None:
            self.log({shown.key: [swanlab.Image(image, caption=caption) for image, caption in pairs]}, step=shown.step)
        else:
            videos = [swanlab.Video(gif(video, rate=shown.rate), caption=caption) for video, caption in pairs]
            self.log({shown.key: videos}, step=shown.step)

    def finding(self, text: str, *, step: int) -> None:
        self._findings.append(f"step {step}: {text}")
        self._run.config.update({"findings": list(self._findings)})
        self._check()

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        error = "the run failed" if status == "failed" else None
        self._run.finish(state=STATES[status], error=error)
        self._check()


def _logged(file: str) -> set[tuple[str, int]]:
    """Key and step of every number and medium in a file of SwanLab."""
    result: set[tuple[str, int]] = set()
    reader = DataStoreReader()
    reader.open(file)
    for content in reader:
        record = Record()
        record.ParseFromString(content)
        for entry in (record.scalar, record.media):
            if entry.key:
                result.add((entry.key, entry.step))
    reader.close()
    return result
