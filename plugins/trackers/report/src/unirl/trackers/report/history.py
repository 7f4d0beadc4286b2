"""History of a run, read from its folder: the events that count, and the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from unirl.core.observe.events import read_events
from unirl.core.observe.recorded import Recorded
from unirl.core.types.event import Event

from .media import MediaKind, RunFolderError, SampleBatch, read_media

__all__ = [
    "Evaluation",
    "Finding",
    "Rows",
    "RunFolderError",
    "RunHistory",
    "SavedCheckpoint",
    "Session",
    "StepRow",
    "add_event",
    "read_history",
    "recipe_values",
]

EVENTS = "events.jsonl"
RECIPE = "recipe.json"
LONGEST = 1e12
"""Seconds."""
LARGEST = 1e100
"""Of counts that are shown."""
MOST_STAGES = 100


@dataclass(frozen=True, kw_only=True)
class StepRow:
    step: int
    """Steps completed with this one."""
    metrics: Mapping[str, float]
    phases: Mapping[str, float]
    """Phase -> seconds."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float]
    phases: Mapping[str, float]
    num_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    step: int
    folder: str
    size_bytes: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    step: int
    text: str


@dataclass(kw_only=True)
class Session:
    """From a start or a resume to its end."""

    first_step: int
    began: float
    """Seconds since the epoch."""
    last_seen: float
    status: str | None = None
    """None when no end was recorded."""
    wall_s: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time: as recorded at the end, else up to the last event."""
        return max(0.0, self.last_seen - self.began) if self.wall_s is None else self.wall_s


@dataclass(kw_only=True)
class RunHistory:
    """A run over all its sessions. Steps that a resumed run repeated count once."""

    folder: Path
    name: str = ""
    recipe: str = ""
    plan_hash: str = ""
    num_steps_planned: int | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Key path -> source and detail."""
    stages: Sequence[Mapping[str, Any]] = ()
    """As `unirl.core.observe.stages.stage_facts` gives them; parents before their children."""
    evaluation: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings of evaluations, as `unirl.core.observe.stages.evaluation_facts` gives them, without those of stages."""
    samplers: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Stage -> settings of the sampler of evaluations."""
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Track -> counts of one step and `generate_share`, by formula."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    sessions: list[Session] = field(default_factory=list[Session])
    steps: list[StepRow] = field(default_factory=list[StepRow])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    checkpoints: list[SavedCheckpoint] = field(default_factory=list[SavedCheckpoint])
    findings: list[Finding] = field(default_factory=list[Finding])
    media: list[SampleBatch] = field(default_factory=list[SampleBatch])

    @property
    def num_steps(self) -> int:
        """Steps completed."""
        return self.steps[-1].step if self.steps else self.sessions[-1].first_step

    @property
    def wall_s(self) -> float:
        return sum(session.seconds for session in self.sessions)

    def settings(self, name: str) -> Mapping[str, Any]:
        """A section of the resolved recipe; empty where there is none."""
        result = self.resolved.get(name)
        return cast("Mapping[str, Any]", result) if isinstance(result, Mapping) else {}

    def batches(self, kind: MediaKind, key: Literal["train", "eval"]) -> list[SampleBatch]:
        """Samples of this kind, by step; with several stages, those of the last stage that has any."""
        all_of = [batch for batch in self.media if batch.kind == kind and batch.samples]
        own = [batch for batch in all_of if batch.key == key or batch.key.startswith(f"{key}/")]
        order = {f"{key}/{stage['name']}": place for place, stage in enumerate(self.stages)}
        last = max((batch.key for batch in own), key=lambda name: order.get(name, -1), default="")
        return [batch for batch in own if batch.key == last]

    def series(self, metric: str) -> dict[str, list[tuple[int, float]]]:
        """Points of a step metric of every track that has it: name -> (step, value). One track has no prefix."""
        result: dict[str, list[tuple[int, float]]] = {}
        for row in self.steps:
            for key, value in row.metrics.items():
                if key == metric or key.endswith(f"/{metric}"):
                    result.setdefault(key, []).append((row.step, value))
        return result


def read_history(folder: Path) -> RunHistory:
    """Read a run folder. Raises RunFolderError, with file and line, when it holds no run or a damaged file."""
    path = folder / EVENTS
    if not path.is_file():
        raise RunFolderError(f"{folder}: it has no {EVENTS}; give the run folder that the run printed.")
    try:
        history = _from_events(folder, read_events(path))
        history.media = read_media(folder)
        if (folder / RECIPE).is_file():
            history.resolved, history.origins = _recipe(folder / RECIPE)
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{folder}: it cannot be read as a run: {error}") from error
    if not history.sessions:
        raise RunFolderError(f"{path}: it records no start of a run; there is nothing to report yet.")
    return history


def _from_events(folder: Path, events: list[Event]) -> RunHistory:
    history, rows = RunHistory(folder=folder), _AllRows()
    for event in events:
        add_event(history, event, rows)
    history.steps = [rows.steps[at] for at in sorted(rows.steps)]
    history.evaluations = [rows.evaluations[at] for at in sorted(rows.evaluations)]
    history.checkpoints = [rows.checkpoints[at] for at in sorted(rows.checkpoints)]
    return history


class Rows(Protocol):
    """Takes the numbers of a run as they are read."""

    def add(self, row: StepRow | Evaluation | SavedCheckpoint) -> None: ...

    def rewind(self, step: int) -> None:
        """Forget everything after this step: it is computed again."""
        ...


class _AllRows:
    """Keeps everything."""

    def __init__(self) -> None:
        self.steps: dict[int, StepRow] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.checkpoints: dict[int, SavedCheckpoint] = {}

    def add(self, row: StepRow | Evaluation | SavedCheckpoint) -> None:
        if isinstance(row, StepRow):
            self.steps[row.step] = row
        elif isinstance(row, Evaluation):
            self.evaluations[row.step] = row
        else:
            self.checkpoints[row.step] = row

    def rewind(self, step: int) -> None:
        for rows in (self.steps, self.evaluations, self.checkpoints):
            for late in [at for at in rows if at > step]:
                del rows[late]


def add_event(history: RunHistory, event: Event, rows: Rows) -> None:
    """Note an event in the history, and its numbers in `rows`; kinds that a history does not have are left out.

    Raises ValueError, with file, line and key, for a value that is not one of a run.
    """
    data = Recorded(where=event.read_from, values=event.data)
    if event.kind in ("run_started", "run_resumed"):
        rows.rewind(event.step)
        history.sessions.append(Session(first_step=event.step, began=event.time, last_seen=event.time))
        _start(history, data)
    elif event.kind == "step":
        rows.add(StepRow(step=event.step, metrics=data.numbers("metrics"), phases=_phases(data)))
    elif event.kind == "evaluated":
        count = data.optional_count("samples")
        metrics = data.numbers("metrics")
        rows.add(Evaluation(step=event.step, metrics=metrics, phases=_phases(data), num_samples=count))
    elif event.kind == "checkpoint_saved":
        rows.add(
            SavedCheckpoint(
                step=event.step,
                folder=data.text("folder", default=""),
                size_bytes=data.optional_number("size_bytes", most=LARGEST),
                seconds=data.optional_number("seconds", most=LONGEST),
            )
        )
    elif event.kind == "finding":
        history.findings.append(Finding(step=event.step, text=data.text("text")))
    elif event.kind == "run_finished" and history.sessions:
        history.sessions[-1].status = data.text("status")
        history.sessions[-1].wall_s = data.optional_number("wall_s", most=LONGEST)
    if history.sessions:
        history.sessions[-1].last_seen = event.time


def _start(history: RunHistory, data: Recorded) -> None:
    """Set what the event of a start or a resume says about the run."""
    history.name, history.recipe = data.text("name"), data.text("recipe")
    history.plan_hash = data.text("plan_hash")
    history.resolved = data.nested("resolved")
    history.num_steps_planned = data.optional_count("steps")
    predicted = data.section("predicted")
    history.predicted = {track: predicted.numbers(track, most=LARGEST) for track in predicted.values}
    versions = data.section("versions")
    history.versions = {dist: versions.text(dist) for dist in versions.values}
    evaluation = data.section("evaluation")
    history.evaluation = {name: evaluation.label(name) for name in evaluation.values if name != "stages"}
    samplers = evaluation.section("stages")
    settings = {stage: samplers.section(stage) for stage in samplers.values}
    history.samplers = {stage: {name: own.label(name) for name in own.values} for stage, own in settings.items()}
    stages = data.sections("stages")
    if len(stages) > MOST_STAGES:
        raise ValueError(f"{data.where}: stages: got {len(stages)}, expected at most {MOST_STAGES}.")
    history.stages = [_stage(stage) for stage in stages]


def _stage(data: Recorded) -> dict[str, Any]:
    names = {name: data.text(name) for name in ("name", "medium", "learner", "model", "engine", "credit")}
    others = {name: data.optional_text(name) for name in ("parent", "algorithm")}
    return {**names, **others, "samples": data.count("samples"), "rewards": data.texts("rewards")}


def _phases(data: Recorded) -> dict[str, float]:
    return data.numbers("phases", most=LONGEST)


def _recipe(file: Path) -> tuple[Mapping[str, Any], dict[str, tuple[str, str]]]:
    """The resolved recipe of a `recipe.json`, and source and detail of each of its values."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: got a {type(content).__name__}, expected a JSON object.")
    data = Recorded(where=str(file), values=cast("dict[str, Any]", content))
    origins = data.section("origins")
    pairs = {key: origins.texts(key) for key in origins.values}
    if odd := next((key for key, pair in pairs.items() if len(pair) != 2), ""):
        raise ValueError(
            f"{origins.where}: {origins.path}{odd}: got {len(pairs[odd])} texts, expected source and detail."
        )
    return data.nested("resolved"), {key: (source, detail) for key, (source, detail) in pairs.items()}


def recipe_values(resolved: Mapping[str, Any]) -> dict[str, str]:
    """Key path -> value as it is shown, of every value of a resolved recipe."""
    return {key: _value_text(value) for key, value in _leaves("", resolved)}


def _leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value


def _value_text(value: Any) -> str:
    return '""' if value == "" else "none" if value is None else str(value)
