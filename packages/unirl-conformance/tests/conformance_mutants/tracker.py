"""Trackers that are broken in one way each, next to one that writes JSON lines and the TensorBoard tracker."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from unirl.core.observe.caption import captions
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import RunInfo, Tracker
from unirl.core.specs.spec import TrackerSpec
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.track import Track
from unirl.trackers.tensorboard.plugin import unirl_trackers
from unirl.trackers.tensorboard.tracker import TensorboardTracker

from conformance_mutants.mutant import mutant, mutants_in


class Notes:
    """Numbers, prompts and texts as JSON lines in the run folder."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.file: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        self.file = self.path(run).open("a", encoding=self.encoding)
        self.write({"started": run.name, "resumed_at": run.resumed_at, "config": run.config})

    def path(self, run: RunInfo) -> Path:
        return run.folder / "notes.jsonl"

    def write(self, line: Mapping[str, Any]) -> None:
        assert self.file is not None, "start() comes first"
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.write({"step": step, **metrics})

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        assert track.media is not None
        for name, media in lineage.items():
            self.write({"step": step, name: list(media.texts)})
        if track.media.kind == "text":
            self.texts(key, track.media.texts, captions(track), step=step)
        else:
            self.write({"step": step, key: captions(track), "mean": float(track.media.stacked.mean())})

    def texts(self, key: str, texts: Sequence[str], lines: Sequence[str], *, step: int) -> None:
        self.write({"step": step, key: list(lines), "texts": list(texts)})

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self.write({"step": event.step, "finding": event.data["text"]})

    def finish(self, status: str) -> None:
        assert self.file is not None, "start() comes first"
        self.write({"status": status})
        self.file.close()


@mutant(claim="a-whole-run-is-accepted", breaks="raises at a kind of event that it does not know")
class KnowsItsEvents(Notes):
    SHOWN: Mapping[str, str] = dict.fromkeys(
        ("run_started", "run_resumed", "rollout", "step", "evaluated", "images", "checkpoint_saved", "finding"), ""
    ) | {"run_finished": "end"}

    def event(self, event: Event) -> None:
        self.write({"step": event.step, "kind": self.SHOWN[event.kind]})


@mutant(
    claim="a-whole-run-is-accepted",
    breaks="takes it that every sample has a reward",
    also=("odd-names-and-long-texts-are-accepted",),
)
class ReadsEveryReward(Notes):
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        super().samples(key, track, step=step, lineage=lineage)
        rewards: Any = track.rewards
        self.write({"step": step, "rewards": [float(reward) for reward in rewards]})


@mutant(
    claim="a-whole-run-is-accepted",
    breaks="takes it that all samples are made from prompts",
    also=("odd-names-and-long-texts-are-accepted", "a-tracker-does-not-modify-its-input"),
)
class KnowsNoParents(Notes):
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        assert not lineage
        super().samples(key, track, step=step, lineage=lineage)


@mutant(
    claim="every-number-that-is-logged-is-kept",
    breaks="keeps the numbers of the last step",
    also=("two-runs-in-one-process-do-not-mix",),
)
class KeepsTheLast(Notes):
    """Writes what it holds at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.held = {"step": step, **metrics}

    def finish(self, status: str) -> None:
        self.write(self.held)
        super().finish(status)


@mutant(claim="every-text-that-is-shown-is-kept", breaks="keeps the first hundred characters of a text")
class ShowsTheBeginning(Notes):
    def texts(self, key: str, texts: Sequence[str], lines: Sequence[str], *, step: int) -> None:
        super().texts(key, [text[:100] for text in texts], lines, step=step)


@mutant(claim="resuming-loses-nothing", breaks="begins the file of its texts anew when a run is resumed")
class TextsStartOver(Notes):
    """Texts have a file of their own, which a resumed run begins anew."""

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.shown = run.folder / "texts.txt"
        self.shown.write_text("", encoding="utf-8")

    def texts(self, key: str, texts: Sequence[str], lines: Sequence[str], *, step: int) -> None:
        with self.shown.open("a", encoding="utf-8") as file:
            file.writelines([*lines, *texts])


@mutant(claim="resuming-loses-nothing", breaks="deletes its file at the start, also of a resumed run")
class StartsOver(Notes):
    def path(self, run: RunInfo) -> Path:
        path = super().path(run)
        path.unlink(missing_ok=True)
        return path


@mutant(
    claim="a-tracker-may-join-when-a-run-is-resumed",
    breaks="reads the file of the first session, which need not be there",
)
class NeedsItsPast(Notes):
    def start(self, run: RunInfo) -> None:
        if run.resumed_at is not None:
            self.path(run).read_text(encoding="utf-8")
        super().start(run)


@mutant(claim="non-finite-numbers-are-accepted", breaks="rounds to whole percents, which NaN has not")
class Percents(TensorboardTracker):
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log({key: round(100 * value) / 100 for key, value in metrics.items()}, step=step)


@mutant(claim="odd-names-and-long-texts-are-accepted", breaks="writes its file in ASCII")
class InAscii(Notes):
    encoding = "ascii"


@mutant(
    claim="odd-names-and-long-texts-are-accepted",
    breaks="names the files of its texts by their keys, slashes and all",
    # Samples of several stages have keys such as `train/rewrite`.
    also=("a-whole-run-is-accepted",),
)
class KeysAreFiles(Notes):
    """Writes the texts of each key into a file of that name."""

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.folder = run.folder

    def texts(self, key: str, texts: Sequence[str], lines: Sequence[str], *, step: int) -> None:
        with (self.folder / f"{key}.txt").open("a", encoding="utf-8") as file:
            file.writelines([*lines, *texts])


@mutant(claim="two-runs-in-one-process-do-not-mix", breaks="writes into the file of the run that started last")
class OneFileForAll(Notes):
    """The file is the class's own: the run that started last has it."""

    current: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        super().start(run)
        OneFileForAll.current = self.file

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        own, self.file = self.file, self.file if self.current is None or self.current.closed else self.current
        super().log(metrics, step=step)
        self.file = own


@mutant(claim="a-tracker-does-not-modify-its-input", breaks="draws a line on the images")
class DrawsOnTheImages(TensorboardTracker):
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        if track.media is not None and track.media.kind == "image":
            track.media.stacked[..., 0] = 1.0
        super().samples(key, track, step=step, lineage=lineage)


@mutant(claim="a-tracker-does-not-modify-its-input", breaks="takes the parents out of the lineage that it is given")
class TakesTheParents(Notes):
    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        super().samples(key, track, step=step, lineage=lineage)
        if isinstance(lineage, dict):
            lineage.clear()


@mutant(claim="a-run-may-end-at-any-time", breaks="takes it that there was a step")
class EndsWhatItShowed(Notes):
    """Sums up the steps that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.seen.append(step)
        super().log(metrics, step=step)

    def finish(self, status: str) -> None:
        try:
            self.write({"first": self.seen[0], "last": self.seen[-1]})
        finally:
            super().finish(status)


@mutant(claim="a-tracker-leaves-nothing-running", breaks="leaves a thread behind")
class FlushesForever(Notes):
    def start(self, run: RunInfo) -> None:
        super().start(run)
        # A daemon, and not for ever: the tests have to end.
        threading.Thread(target=threading.Event().wait, args=(120,), daemon=True, name="flusher").start()


SPEC = TrackerSpec(
    name="notes",
    summary="Numbers and captions as JSON lines",
    build=f"{__name__}:build",
    config="unirl.core.specs.config:PartConfig",
)
(TENSORBOARD,) = unirl_trackers()

BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: Any) -> Tracker:
    """The tracker that the config's `use` names."""
    kinds = {mutant.name: kind for kind, mutant in BROKEN.items()}
    kind = kinds.get(config.use, Notes)
    return kind(config) if issubclass(kind, TensorboardTracker) else kind()


def catalog() -> Catalog:
    broken = [
        dataclasses.replace(
            TENSORBOARD if issubclass(kind, TensorboardTracker) else SPEC, name=mutant.name, build=f"{__name__}:build"
        )
        for kind, mutant in BROKEN.items()
    ]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(unirl_trackers=hookimpl(lambda: [SPEC, TENSORBOARD])),
            "unirl-mutants": SimpleNamespace(unirl_trackers=hookimpl(lambda: broken)),
        }
    )
