"""A tracker with runs for it to show: their events, numbers and samples, driven as a run drives them."""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from unirl.core.events import Event, EventStream
from unirl.core.roles import RunInfo, Tracker
from unirl.core.run import EVENTS_FILE, RECIPE_FILE
from unirl.core.spec import TrackerSpec
from unirl.core.tracking import TakesTexts, Trackers

from .base import Bench

__all__ = ["CONFIG", "Life", "TrackerBench", "files_left", "numbers", "pictures", "writing"]

CONFIG: Mapping[str, Any] = {
    "run": {"steps": 4, "seed": 0, "dir": None},
    "algorithm": {"use": "flow-grpo", "clip_range": 1e-4, "betas": [0.9, 0.999]},
    "tracker": {},
}
"""A resolved recipe, as plain data."""
NAME = "trial"


class Life:
    """One session of a run with one tracker, from its start to its end.

    Numbers, events and samples go the way that they go in a run, through `unirl.core.tracking`. There a tracker that
    raises is left out and the run goes on; here the claim fails. Whatever happens, leaving the context ends it.
    """

    def __init__(self, tracker: Tracker, folder: Path, *, name: str = NAME, resumed_at: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = tracker
        self.folder = folder
        self.info = RunInfo(
            name=name,
            folder=folder,
            plan_hash="0123456789abcdef",
            config=copy.deepcopy(CONFIG),
            resumed_at=resumed_at,
        )
        self._at = resumed_at or 0
        self._is_ended = False
        recipe = {"recipe": "trial", "resolved": CONFIG, "origins": {"run.seed": ["default", "RunConfig"]}}
        (folder / RECIPE_FILE).write_text(json.dumps(recipe), encoding="utf-8")
        self._watched = _Watched(tracker)
        self.events = EventStream(folder / EVENTS_FILE)
        self._trackers = Trackers({"tried": self._watched}, self.events)

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self) -> Life:
        """Up to the moment at which the run announces itself."""
        self._try(lambda: self._trackers.start(self.info))
        return self

    def announce(self) -> Life:
        kind = "run_started" if self.info.resumed_at is None else "run_resumed"
        self.emit(
            kind,
            step=self._at,
            name=self.info.name,
            recipe="trial",
            plan_hash=self.info.plan_hash,
            resolved=copy.deepcopy(CONFIG),
            steps=4,
            predicted={"image": {"rollout_rows": 64, "train_rows": 64, "generate_share": 0.25}},
            versions={"unirl-core": "0.1.0"},
        )
        return self

    def emit(self, kind: str, *, step: int, **data: Any) -> None:
        self._try(lambda: self.events.emit(kind, step=step, **data))

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        self._at = done
        self.emit("step", step=done, metrics=metrics, phases={"generate": 0.5, "train": 0.25}, samples=4)

    def steps(self, wanted: Sequence[int], *, prefix: str = "", width: int = 2) -> None:
        """Steps with random numbers, the same for the same step."""
        for done in wanted:
            self.step(done, {f"{prefix}{key}": value for key, value in numbers(done, width=width).items()})

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self.emit("evaluated", step=step, metrics=metrics, samples=4, phases={"evaluate": 0.125})

    def images(self, key: str, images: Tensor, captions: Sequence[str], *, step: int) -> None:
        self._try(lambda: self._watched.images(key, images, captions, step=step))

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        """As in a run, a tracker that takes no texts gets none."""
        if isinstance(cast(object, self.tracker), TakesTexts):
            self._try(lambda: self._watched.texts(key, texts, captions, step=step))

    def finish(self, status: Literal["done", "stopped", "failed"] = "done") -> None:
        problem = "RunFailed: no space left" if status == "failed" else ""
        self.emit("run_finished", step=self._at, status=status, wall_s=1.5, folder=str(self.folder), error=problem)
        self._is_ended = True
        self._try(lambda: self._trackers.finish(status, step=self._at))
        self.events.close()

    def end(self) -> None:
        """Let go of everything, also where something failed before."""
        if not self._is_ended:
            self._is_ended = True
            # What failed has been raised; this is to close the tracker's files.
            with suppress(Exception):
                self.tracker.finish("failed")
        self.events.close()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            failed = self._watched.failed
            if failed is not None:
                self.end()
                where, error = failed
                raise AssertionError(f"`{where}` raises {type(error).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TrackerBench(Bench):
    @property
    def spec(self) -> TrackerSpec:
        return cast(TrackerSpec, self.subject.found("tracker").spec)

    def tracker(self) -> Tracker:
        """A new one, with the settings of its spec's `trial`."""
        found = self.subject.found("tracker")
        return cast(Tracker, self.workshop.build(found, self.workshop.config(found)))

    def life(self, folder: str = "run", *, name: str = NAME, resumed_at: int | None = None) -> Life:
        """A session of the run in this folder, with a tracker of its own, announced; a context."""
        return self.quiet_life(folder, name=name, resumed_at=resumed_at).announce()

    def quiet_life(self, folder: str = "run", *, name: str = NAME, resumed_at: int | None = None) -> Life:
        """The same, started but not announced."""
        return Life(self.tracker(), self.folder / folder, name=name, resumed_at=resumed_at).start()


def numbers(step: int, *, width: int = 2) -> dict[str, float]:
    """Random numbers, which no compression makes smaller."""
    drawn = torch.rand(width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {f"reward/{number}" if number else "reward_mean": float(value) for number, value in enumerate(drawn)}


def pictures(count: int, *, height: int = 8, width: int = 8) -> Tensor:
    """[count, 3, height, width] noise in [0, 1]; the same pictures each time."""
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


def writing(seed: int, *, length: int) -> str:
    """Random letters, digits and two signs, which no compression makes smaller than six bits a character."""
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits + "+/", k=length))


def files_left(folder: Path) -> dict[str, int]:
    """Size in bytes of every file below a run folder that the run itself did not write. Links count once."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name not in (EVENTS_FILE, RECIPE_FILE)
    }


class _Watched:
    """A tracker whose first failure is kept, because a run carries on without it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.failed: tuple[str, Exception] | None = None

    def start(self, run: RunInfo) -> None:
        self._call("start", lambda: self._tracker.start(run))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._call("log", lambda: self._tracker.log(metrics, step=step))

    def images(self, key: str, images: Any, captions: Sequence[str], *, step: int) -> None:
        self._call("images", lambda: self._tracker.images(key, images, captions, step=step))

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        self._call("texts", lambda: self._tracker.texts(key, texts, captions, step=step))

    def event(self, event: Event) -> None:
        self._call(f"event {event.kind}", lambda: self._tracker.event(event))

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        self._call(f"finish {status}", lambda: self._tracker.finish(status))

    def _call(self, where: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.failed = self.failed or (where, error)
            raise
