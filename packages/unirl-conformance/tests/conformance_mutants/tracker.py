"""Trackers that are broken in one way each, next to one that writes JSON lines and the TensorBoard tracker."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from unirl.core.catalog import Catalog
from unirl.core.events import Event
from unirl.core.hookspec import hookimpl
from unirl.core.roles import RunInfo, Tracker
from unirl.core.spec import TrackerSpec
from unirl.trackers.tensorboard.plugin import unirl_trackers
from unirl.trackers.tensorboard.tracker import TensorboardTracker

from conformance_mutants.mutant import Mutant


class Lines:
    """Numbers and captions as JSON lines in the run folder; of before there were text samples."""

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

    def images(self, key: str, images: Any, captions: Sequence[str], *, step: int) -> None:
        self.write({"step": step, key: list(captions), "mean": float(images.mean())})

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self.write({"step": event.step, "finding": event.data["text"]})

    def finish(self, status: str) -> None:
        assert self.file is not None, "start() comes first"
        self.write({"status": status})
        self.file.close()


class Notes(Lines):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        self.write({"step": step, key: list(captions), "texts": list(texts)})


class KnowsItsEvents(Notes):
    SHOWN: Mapping[str, str] = dict.fromkeys(
        ("run_started", "run_resumed", "rollout", "step", "evaluated", "images", "checkpoint_saved", "finding"), ""
    ) | {"run_finished": "end"}

    def event(self, event: Event) -> None:
        self.write({"step": event.step, "kind": self.SHOWN[event.kind]})


class ReadsEveryReward(Notes):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        super().texts(key, texts, captions, step=step)
        self.write({"step": step, "rewards": [float(caption.split("| reward ")[1]) for caption in captions]})


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


class ShowsTheBeginning(Notes):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        super().texts(key, [text[:100] for text in texts], captions, step=step)


class TextsStartOver(Notes):
    """Texts have a file of their own, which a resumed run begins anew."""

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.shown = run.folder / "texts.txt"
        self.shown.write_text("", encoding="utf-8")

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        with self.shown.open("a", encoding="utf-8") as file:
            file.writelines([*captions, *texts])


class StartsOver(Notes):
    def path(self, run: RunInfo) -> Path:
        path = super().path(run)
        path.unlink(missing_ok=True)
        return path


class NeedsItsPast(Notes):
    def start(self, run: RunInfo) -> None:
        if run.resumed_at is not None:
            self.path(run).read_text(encoding="utf-8")
        super().start(run)


class Percents(TensorboardTracker):
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log({key: round(100 * value) / 100 for key, value in metrics.items()}, step=step)


class InAscii(Notes):
    encoding = "ascii"


class KeysAreFiles(Notes):
    """Writes the texts of each key into a file of that name."""

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.folder = run.folder

    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        with (self.folder / f"{key}.txt").open("a", encoding="utf-8") as file:
            file.writelines([*captions, *texts])


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


class DrawsOnTheImages(TensorboardTracker):
    def images(self, key: str, images: Any, captions: Sequence[str], *, step: int) -> None:
        images[..., 0] = 1.0
        super().images(key, images, captions, step=step)


class SortsTheTexts(Notes):
    def texts(self, key: str, texts: Sequence[str], captions: Sequence[str], *, step: int) -> None:
        if isinstance(texts, list):
            texts.sort()
        super().texts(key, texts, captions, step=step)


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


class FlushesForever(Notes):
    def start(self, run: RunInfo) -> None:
        super().start(run)
        # A daemon, and not for ever: the tests have to end.
        threading.Thread(target=threading.Event().wait, args=(120,), daemon=True, name="flusher").start()


SPEC = TrackerSpec(
    name="notes",
    summary="Numbers and captions as JSON lines",
    build=f"{__name__}:build",
    config="unirl.core.config:PartConfig",
)
BEFORE = dataclasses.replace(SPEC, name="lines")
(TENSORBOARD,) = unirl_trackers()

BROKEN: dict[type[Any], Mutant] = {
    KnowsItsEvents: Mutant(
        claim="a-whole-run-is-taken", name="knows-its-events", broken="raises at a kind of event that it does not know"
    ),
    ReadsEveryReward: Mutant(
        claim="a-whole-run-is-taken",
        name="reads-every-reward",
        broken="takes it that a caption ends with the reward",
        also=("odd-names-and-long-texts-are-taken", "a-tracker-leaves-what-it-is-given-as-it-is"),
    ),
    ShowsTheBeginning: Mutant(
        claim="every-text-that-is-shown-is-kept",
        name="shows-the-beginning",
        broken="keeps the first hundred characters of a text",
    ),
    TextsStartOver: Mutant(
        claim="a-resumed-run-loses-nothing-that-was-there",
        name="texts-start-over",
        broken="begins the file of its texts anew when a run is resumed",
    ),
    KeysAreFiles: Mutant(
        claim="odd-names-and-long-texts-are-taken",
        name="keys-are-files",
        broken="names the files of its texts by their keys, slashes and all",
    ),
    SortsTheTexts: Mutant(
        claim="a-tracker-leaves-what-it-is-given-as-it-is",
        name="sorts-the-texts",
        broken="sorts the list of texts that it is given",
    ),
    KeepsTheLast: Mutant(
        claim="every-number-that-is-logged-is-kept",
        name="keeps-the-last",
        broken="keeps the numbers of the last step",
        also=("two-runs-in-one-process-do-not-mix",),
    ),
    StartsOver: Mutant(
        claim="a-resumed-run-loses-nothing-that-was-there",
        name="starts-over",
        broken="deletes its file at the start, also of a resumed run",
    ),
    NeedsItsPast: Mutant(
        claim="a-tracker-may-join-when-a-run-is-resumed",
        name="needs-its-past",
        broken="reads the file of the first session, which need not be there",
    ),
    Percents: Mutant(
        claim="numbers-that-are-not-finite-are-taken",
        name="percents",
        broken="rounds to whole percents, which NaN has not",
    ),
    InAscii: Mutant(claim="odd-names-and-long-texts-are-taken", name="in-ascii", broken="writes its file in ASCII"),
    OneFileForAll: Mutant(
        claim="two-runs-in-one-process-do-not-mix",
        name="one-file-for-all",
        broken="writes into the file of the run that started last",
    ),
    DrawsOnTheImages: Mutant(
        claim="a-tracker-leaves-what-it-is-given-as-it-is",
        name="draws-on-the-images",
        broken="draws a line on the images",
    ),
    EndsWhatItShowed: Mutant(
        claim="a-run-may-end-at-any-time-and-in-any-way",
        name="ends-what-it-showed",
        broken="takes it that there was a step",
    ),
    FlushesForever: Mutant(
        claim="a-tracker-leaves-nothing-running", name="flushes-forever", broken="leaves a thread behind"
    ),
}
MUTANTS = list(BROKEN.values())


def build(config: Any) -> Tracker:
    """The tracker that the config's `use` names."""
    kinds = {mutant.name: kind for kind, mutant in BROKEN.items()}
    kind = Lines if config.use == BEFORE.name else kinds.get(config.use, Notes)
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
            "unirl-well": SimpleNamespace(unirl_trackers=hookimpl(lambda: [SPEC, BEFORE, TENSORBOARD])),
            "unirl-mutants": SimpleNamespace(unirl_trackers=hookimpl(lambda: broken)),
        }
    )
