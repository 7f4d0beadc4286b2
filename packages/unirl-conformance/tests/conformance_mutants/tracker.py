"""Trackers with one fault each, next to one that writes JSON lines and the TensorBoard tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from unirl.core.observe.caption import captions
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import RunInfo
from unirl.core.specs.spec import TrackerSpec
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.track import Track
from unirl.trackers.tensorboard.plugin import unirl_trackers

from conformance_mutants.changes import first, leaves_thread, returns, takes, then
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

EVENTS = ("run_started", "run_resumed", "rollout", "step", "evaluated", "images", "checkpoint_saved", "finding")
APART = "two-runs-in-one-process-do-not-mix"
WHOLE_RUN, ODD_NAMES = "a-whole-run-is-accepted", "odd-names-and-long-texts-are-accepted"
RESUMED, INPUT = "resuming-loses-nothing", "a-tracker-does-not-modify-its-input"


class Notes:
    """Numbers, prompts and texts as JSON lines in the run folder."""

    encoding = "utf-8"

    def __init__(self, config: Any) -> None:
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


SPEC = TrackerSpec(
    name="notes",
    summary="Numbers and captions as JSON lines",
    build=f"{__name__}:Notes",
    config="unirl.core.specs.part_config:PartConfig",
)
(TENSORBOARD,) = unirl_trackers()


def tracker(
    name: str, claim: str, breaks: str, *, spec: TrackerSpec = SPEC, also: tuple[str, ...] = (), **changes: Any
) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, also=also, spec=spec, changes=changes)


def knows_events(part: Notes, _: Any, event: Event) -> None:
    shown = {**dict.fromkeys(EVENTS, ""), "run_finished": "end"}
    part.write({"step": event.step, "kind": shown[event.kind]})


def write_rewards(part: Notes, _: str, track: Any, *, step: int, **__: Any) -> None:
    part.write({"step": step, "rewards": [float(reward) for reward in track.rewards]})


def refuse_parents(*_: Any, lineage: Any, **__: Any) -> None:
    assert not lineage


def begin_texts(part: Notes, run: RunInfo) -> None:
    part.folder = run.folder
    (run.folder / "texts.txt").write_text("", encoding="utf-8")


def writes_texts(name: str) -> Any:
    """Writes the texts into a file of this name, in which {key} is theirs."""

    def texts(part: Notes, _: Any, key: str, texts: Sequence[str], lines: Sequence[str], *, step: int) -> None:
        with (part.folder / name.format(key=key)).open("a", encoding="utf-8") as file:
            file.writelines([*lines, *texts])

    return texts


def read_past(part: Notes, run: RunInfo) -> None:
    if run.resumed_at is not None:
        part.path(run).read_text(encoding="utf-8")


def draw_on_images(_: Any, __: str, track: Track, **rest: Any) -> None:
    if track.media is not None and track.media.kind == "image":
        track.media.stacked[..., 0] = 1.0


def take_parents(*_: Any, lineage: Any, **__: Any) -> None:
    if isinstance(lineage, dict):
        lineage.clear()


def sums_up_steps(part: Notes, finish: Any, status: str) -> None:
    steps = vars(part).get("steps", [])
    try:
        part.write({"first": steps[0], "last": steps[-1]})
    finally:
        finish(status)


# fmt: off
MUTANTS = [
    tracker("knows-its-events", WHOLE_RUN, "raises at a kind of event that it does not know", event=knows_events),
    tracker("reads-every-reward", WHOLE_RUN, "assumes that every sample has a reward", also=(ODD_NAMES,),
            samples=then(write_rewards)),
    tracker("knows-no-parents", WHOLE_RUN, "assumes that all samples are made from prompts", also=(ODD_NAMES, INPUT),
            samples=first(refuse_parents)),
    tracker("keeps-the-last", "every-number-that-is-logged-is-kept", "keeps the numbers of the last step",
            also=(APART,),
            log=lambda part, _, metrics, *, step: setattr(part, "held", {"step": step, **metrics}),
            finish=first(lambda part, _: part.write(vars(part).get("held", {})))),
    tracker("shows-the-beginning", "every-text-that-is-shown-is-kept", "keeps the first hundred characters of a text",
            texts=lambda _, write, key, texts, *rest, **how: write(key, [text[:100] for text in texts], *rest, **how)),
    tracker("texts-start-over", RESUMED, "begins the file of its texts anew when a run is resumed",
            start=first(begin_texts), texts=writes_texts("texts.txt")),
    tracker("starts-over", RESUMED, "deletes its file at the start, also of a resumed run",
            path=returns(lambda path: path.unlink(missing_ok=True) or path)),
    tracker("needs-its-past", "a-tracker-may-join-when-a-run-is-resumed",
            "reads the file of the first session, which need not be there", start=first(read_past)),
    tracker("percents", "non-finite-numbers-are-accepted", "rounds to whole percents, which NaN has not",
            spec=TENSORBOARD,
            log=takes(lambda metrics: {key: round(100 * value) / 100 for key, value in metrics.items()})),
    tracker("in-ascii", ODD_NAMES, "writes its file in ASCII",
            start=first(lambda part, _: setattr(part, "encoding", "ascii"))),
    # Samples of several stages have keys such as `train/rewrite`.
    tracker("keys-are-files", ODD_NAMES, "names the files of its texts by their keys, slashes and all",
            also=(WHOLE_RUN,), start=first(begin_texts), texts=writes_texts("{key}.txt")),
    tracker("one-file-for-all", APART,
            "writes into the file of the run that started last", spec=replace(SPEC, build=f"{__name__}:OneFileForAll")),
    tracker("draws-on-the-images", INPUT, "draws a line on the images", spec=TENSORBOARD,
            samples=first(draw_on_images)),
    tracker("takes-the-parents", INPUT, "takes the parents out of the lineage that it is given",
            samples=then(take_parents)),
    tracker("ends-what-it-showed", "a-run-may-end-at-any-time", "assumes that there was a step",
            log=first(lambda part, _, step: vars(part).setdefault("steps", []).append(step)), finish=sums_up_steps),
    tracker("flushes-forever", "a-tracker-leaves-nothing-running", "leaves a thread behind",
            start=leaves_thread(seconds=120)),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    return catalog_of(plugin(trackers=[SPEC, TENSORBOARD]), trackers=specs(MUTANTS, module=__name__))
