"""A tracker whose library runs in a separate process, and the id of the run that a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from unirl.core.observe.caption import captions
from unirl.core.roles import RunInfo

from .client_process import ClientProcess, TrackerFailed
from .shown import Shown, pixels, sample_table

if TYPE_CHECKING:
    from unirl.core.types.event import Event
    from unirl.core.types.media import Media
    from unirl.core.types.track import Track

__all__ = ["ClientTracker", "TrackerClient", "kept_id"]

FINISH_S = 60.0
"""Longest wait, at the end of a run, for what has not been logged yet."""


class TrackerClient(Protocol):
    """The part of a tracker that uses its library. Built from the tracker's config, in a separate process."""

    def start(self, run: RunInfo, *, run_id: str | None) -> str:
        """Open the run, or continue the one with this id, without repeating steps that it has; its id."""
        ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def show(self, shown: Shown) -> None: ...
    def finding(self, text: str, *, step: int) -> None: ...
    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        """Send what is left and end the run."""
        ...


class ClientTracker:
    """A `unirl.core.roles.Tracker` that hands everything to a `TrackerClient`.

    `start` waits for the client. After it nothing waits: a call that fails, or a server that falls too far behind, is
    raised by the next call. Id of the run and prints of the library are in `<run folder>/<name>`.
    """

    def __init__(
        self,
        name: str,
        client: str,
        settings: object,
        *,
        max_images: int,
        max_texts: int,
        init_timeout_s: float,
        run_id: str | None = None,
        variables: Callable[[Path], Mapping[str, str]] = lambda folder: {},
        secrets: Sequence[str] = (),
    ) -> None:
        """name: key of the tracker, and its folder in the run folder.
        client: `module:Class` of the client, built from `settings`.
        run_id: what the user asked for, in the recipe or a variable of the library.
        variables: defaults of the environment of its process, given the tracker's folder.
        """
        self._name, self._client, self._settings = name, client, settings
        self._max_images, self._max_texts, self._init_timeout_s = max_images, max_texts, init_timeout_s
        self._run_id, self._variables, self._secrets = run_id, variables, secrets
        self._open: ClientProcess | None = None

    @property
    def _process(self) -> ClientProcess:
        assert self._open is not None, "start() comes first"
        return self._open

    def start(self, run: RunInfo) -> None:
        """Open the run, or continue that of this folder. Raises TrackerFailed if the library or its server refuses."""
        folder = run.folder.absolute() / self._name
        kept = folder / "unirl-run.json"
        run_id = kept_id(kept, asked=self._run_id, resumed=run.resumed_at is not None, key=f"tracker.{self._name}")
        self._open = ClientProcess(
            self._client,
            self._settings,
            log=folder / "client.log",
            variables=self._variables(folder),
            secrets=self._secrets,
        )
        run_id = self._process.call("start", run, run_id=run_id, timeout_s=self._init_timeout_s)
        kept.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._process.send("log", {key: float(value) for key, value in metrics.items()}, step=step)

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        """Hand over the first samples; sounds are left out."""
        media = track.media
        if media is None or media.kind == "audio" or not track.num_rows:
            return
        limit = self._max_texts if media.kind == "text" else self._max_images
        shown = track.select(range(min(limit, track.num_rows)))
        texts = {name: each for name, each in lineage.items() if each.kind == "text"}
        if media.kind == "text":
            texts[track.name if lineage else "text"] = media
        columns, rows = sample_table(shown, texts, cell=lambda each, row: each.texts[row])
        values = media.texts if media.kind == "text" else None
        self._process.send(
            "show",
            Shown(
                key=key,
                step=step,
                kind=media.kind,
                media=[values[row] if values else pixels(media.array(row)).numpy() for row in range(shown.num_rows)],
                captions=captions(shown),
                columns=columns,
                rows=rows,
                rate=media.rate,
            ),
        )

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self._process.send("finding", str(event.data["text"]), step=event.step)

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        """Wait, for a minute at most, until everything is logged. May be called twice, and without a start."""
        process, self._open = self._open, None
        if process is not None:
            process.call("finish", status, timeout_s=FINISH_S)
            process.wait()


def kept_id(kept: Path, *, asked: str | None, resumed: bool, key: str) -> str | None:
    """Id of the run that a run folder belongs to, in a resumed run, else the one that was asked for.

    kept: file of an earlier session; nothing need be there.
    Raises TrackerFailed for a damaged file, and when another run was asked for.
    """
    if not resumed or not kept.exists():
        return asked or None
    try:
        result = str(json.loads(kept.read_text(encoding="utf-8"))["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise TrackerFailed(
            f"{kept} does not hold a run id ({error}). Delete it to go on as a new run, "
            'or write {"id": "<run id>"} into it.'
        ) from error
    if asked and asked != result:
        raise TrackerFailed(
            f"{key}.run_id: got {asked!r}, but this run folder belongs to run {result!r}. "
            "Leave it, and variables that set it, empty to continue that one."
        )
    return result
