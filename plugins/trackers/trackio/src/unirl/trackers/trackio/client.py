"""Trackio's client, for one run. Used in a separate process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from unirl.core.roles import RunInfo
from unirl.tracker_host.animation import gif
from unirl.tracker_host.client_process import TrackerFailed
from unirl.tracker_host.shown import Shown

import trackio
from trackio.remote_client import RemoteClient
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import parse_trackio_server_url, resolve_space_id_and_server_url

from .config import TrackioConfig

__all__ = ["TrackioTrackerClient"]


class TrackioTrackerClient:
    """A `unirl.tracker_host.client_tracker.TrackerClient`.

    Numbers are logged by step, images and videos under `<key>/00` and so on with their captions, texts as the table
    `<key>/texts`, and samples with parents also as the table `<key>/samples`. Findings and the status are alerts.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._problems: list[str] = []
        self._known: set[tuple[str, int]] = set()
        """Key and step of what an earlier session logged: Trackio would keep both."""
        self._temporary, self._videos = TemporaryDirectory(), 0
        warnings.showwarning = self._on_warning

    def _on_warning(self, message: Any, category: Any, filename: str, *rest: Any) -> None:
        # Trackio raises nothing: what it loses it says in a warning.
        if Path(filename).parent.name == "trackio" and not str(message).startswith("Reserved keys renamed"):
            self._problems.append(str(message))

    def _check(self) -> None:
        """Raise TrackerFailed for what went wrong since the last call."""
        if self._problems:
            raise TrackerFailed(" ".join(self._problems))

    def start(self, run: RunInfo, *, run_id: str | None) -> str:
        name = self._config.name or run.name
        self._run = trackio.init(
            project=self._config.project,
            name=name,
            group=self._config.group or None,
            server_url=self._config.server_url or None,
            space_id=self._config.space_id or None,
            config={**run.config, "plan_hash": run.plan_hash},
            resume="never" if run_id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if run_id is not None:
            # Trackio looks for the newest run of this name, which may be another one.
            self._run.id = run_id
            rows = self._logged(name)
            self._known = {(key, row["step"]) for row in rows for key in row if row["step"] is not None}
        self._check()
        return self._run.id

    def _logged(self, name: str) -> list[dict[str, Any]]:
        """What the run of this name has logged, one mapping for each call."""
        which: dict[str, Any] = {"project": self._config.project, "run": name, "run_id": self._run.id}
        space, server = resolve_space_id_and_server_url(self._config.space_id or None, self._config.server_url or None)
        remote = space or server
        if remote is None:
            return SQLiteStorage.get_logs(**which)
        base, token = (remote, None) if space else parse_trackio_server_url(remote)
        client = RemoteClient(base, write_token=token, verbose=False)
        return client.predict(**which, api_name="/get_logs")

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        new = {key: value for key, value in metrics.items() if (key, step) not in self._known}
        if new:
            self._run.log(new, step=step)
        self._check()

    def show(self, shown: Shown) -> None:
        table = None
        if shown.kind == "text":
            table = f"{shown.key}/texts"
        elif len(shown.columns) > len(("prompt", "reward", "truncated")):
            table = f"{shown.key}/samples"
        logged: dict[str, Any] = {}
        if table is not None:
            logged[table] = trackio.Table(columns=list(shown.columns), data=[list(row) for row in shown.rows])
        if shown.kind != "text":
            for row, (media, caption) in enumerate(zip(shown.media, shown.captions, strict=True)):
                logged[f"{shown.key}/{row:02d}"] = self._media(media, caption, rate=shown.rate)
        self.log(logged, step=shown.step)

    def _media(self, media: Any, caption: str, *, rate: float | None) -> Any:
        if rate is None:
            return trackio.Image(media, caption=caption)
        # Of frames, Trackio itself would need ffmpeg to make a video.
        self._videos += 1
        file = Path(self._temporary.name) / f"{self._videos}.gif"
        file.write_bytes(gif(media, rate=rate))
        return trackio.Video(file, caption=caption)

    def finding(self, text: str, *, step: int) -> None:
        self._run.alert("finding", text, level=trackio.AlertLevel.WARN, step=step)
        self._check()

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        self._run.alert(f"run {status}", level=trackio.AlertLevel.INFO)
        self._run.finish()
        self._temporary.cleanup()
        self._check()
