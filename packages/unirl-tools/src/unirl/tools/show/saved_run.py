"""What a run folder says about its samples: saved tracks, the stages that made them, metrics, and files of media."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from unirl.core.errors import RecipeError, RunFolderError
from unirl.core.names import did_you_mean
from unirl.core.observe.events import read_events
from unirl.core.observe.recorded import Recorded
from unirl.core.types.event import Event
from unirl.core.types.track import Track
from unirl.loop.run_folder import EVENTS_FILE, RECIPE_FILE
from unirl.loop.saved_samples import SavedTrack, read_samples, saved_steps

from ..kept_media import kept_media

__all__ = ["SavedRun", "SavedSample", "StepSamples", "open_run"]


@dataclass(frozen=True, kw_only=True)
class SavedSample:
    """One sample of a saved track."""

    track: Track
    row: int
    is_left_out: bool
    """The algorithm left it out of training."""

    @property
    def name(self) -> str:
        return self.track.sample_ids[self.row]


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The samples of one step."""

    step: int
    """Steps that were completed before it."""
    stages: Mapping[str, SavedTrack]

    def of(self, stage: str) -> list[SavedSample]:
        """Every sample of a stage."""
        saved = self.stages[stage]
        tracks = [(saved.track, False), *([(saved.left_out, True)] if saved.left_out else [])]
        return [
            SavedSample(track=track, row=row, is_left_out=is_left_out)
            for track, is_left_out in tracks
            for row in range(track.num_rows)
        ]

    @cached_property
    def by_name(self) -> Mapping[str, SavedSample]:
        """The samples of all stages by their ids, which no two of a run share."""
        return {sample.name: sample for stage in self.stages for sample in self.of(stage)}

    def lineage(self, sample: SavedSample) -> list[SavedSample]:
        """The sample and those that it was made from, the first stage's first."""
        result = [sample]
        while sample.track.parent_track is not None:
            sample = self.by_name[cast("tuple[str, ...]", sample.track.parent_ids)[sample.row]]
            result.append(sample)
        return result[::-1]

    def children(self, sample: SavedSample) -> Iterator[SavedSample]:
        """The samples that were made from this one."""
        for other in self.by_name.values():
            ids = other.track.parent_ids
            if other.track.parent_track == sample.track.name and ids is not None and ids[other.row] == sample.name:
                yield other


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run folder with saved samples."""

    folder: Path
    name: str
    started: Recorded
    """The event of its last start or resume."""
    steps: tuple[int, ...]
    """Steps whose samples are saved, rising; see `StepSamples.step`."""
    metrics: Mapping[int, Mapping[str, float]]
    """Step, counted in the same way -> metrics of that step, once it has been trained on."""

    @property
    def resolved(self) -> Recorded:
        """The resolved recipe."""
        return self.started.section("resolved")

    @property
    def started_in(self) -> Path:
        """The folder that relative paths of the recipe begin in."""
        file = self.folder / RECIPE_FILE
        try:
            recipe: Any = json.loads(file.read_text(encoding="utf-8"))
            return Path(Recorded(where=str(file), values=recipe).text("started_in"))
        except (OSError, ValueError, TypeError) as error:
            raise RunFolderError(f"{file}: cannot be read as the recipe of a run: {error}") from error

    @cached_property
    def stages(self) -> Mapping[str, Recorded]:
        """Stage -> its facts, as `unirl.core.observe.stages.stage_facts` gives them; parents first."""
        return {stage.text("name"): stage for stage in self.started.sections("stages")}

    @cached_property
    def media(self) -> Mapping[str, str]:
        """Sample -> its image or video in the run folder, where the tracker `report` saved one."""
        kept = (one for one in kept_media(self.folder) if one.sample and one.key.startswith("train"))
        return {one.sample: str(one.file.relative_to(self.folder)) for one in kept}

    def samples(self, step: int) -> StepSamples:
        """The samples of a saved step. Raises RunFolderError for files that cannot be read."""
        try:
            stages = read_samples(self.folder, step)
        except RunFolderError as error:
            versions = self.started.section("versions").values
            dists = ", ".join(f"{name} {version}" for name, version in versions.items())
            error.args = (f"{error} The run was made with {dists or 'unknown versions'}.",)
            raise
        # Their order is that of the recipe.
        order = [
            *(name for name in self.stages if name in stages),
            *(name for name in stages if name not in self.stages),
        ]
        result = StepSamples(step=step, stages={name: stages[name] for name in order})
        if not result.by_name:
            raise RunFolderError(f"{self.folder}: the files of step {step} are missing; the run may still write them.")
        return result

    def chosen_step(self, step: int | None) -> int:
        """A step that was asked for, by default the last one. Raises RecipeError for one that is not saved."""
        if step is None:
            return self.steps[-1]
        if step not in self.steps:
            raise RecipeError(f"--step: got {step}, expected one of {self.listed_steps}; {self._setting()}.")
        return step

    def sample(self, name: str) -> tuple[StepSamples, SavedSample]:
        """A sample by its id, with its step. Raises RecipeError for an id that no saved sample has."""
        number = re.match(r"r(\d+)/", name)
        if number and int(number[1]) not in self.steps:
            raise RecipeError(
                f"--sample: the samples of step {number[1]} are not saved, and {name!r} is of that step; saved are "
                f"{self.listed_steps}: {self._setting()}."
            )
        samples = self.samples(int(number[1]) if number else self.steps[-1])
        if name not in samples.by_name:
            hint = did_you_mean(name, samples.by_name)
            raise RecipeError(
                f"--sample: got {name!r}, which none of the {len(samples.by_name)} samples of step {samples.step} is"
                f"{hint or f'; `unirl show {self.folder} --step {samples.step}` lists them.'}"
            )
        return samples, samples.by_name[name]

    @property
    def listed_steps(self) -> str:
        """The saved steps, in the middle of many cut short."""
        names = [str(step) for step in self.steps]
        return ", ".join(names if len(names) <= 12 else [*names[:8], "...", *names[-3:]])

    def _setting(self) -> str:
        return f"run.media_every={self.resolved.section('run').values.get('media_every')} saves them"


def open_run(folder: Path) -> SavedRun:
    """A run folder with saved samples.

    Raises RunFolderError for a folder without a run, one that cannot be read, and a run that saved no samples.
    """
    file = folder / EVENTS_FILE
    if not file.is_file():
        siblings = [path.parent.name for path in folder.parent.glob(f"*/{EVENTS_FILE}")]
        problem = f"got no {EVENTS_FILE} in it" if folder.is_dir() else "no such folder"
        hint = did_you_mean(folder.name, siblings)
        raise RunFolderError(f"{folder}: {problem}, expected a run folder{hint or '.'}")
    started: Event | None = None
    metrics: dict[int, Mapping[str, float]] = {}
    for event in _events(file):
        if event.kind in ("run_started", "run_resumed"):
            started = event
            metrics = {step: numbers for step, numbers in metrics.items() if step < event.step}
        elif event.kind == "step" and event.step:
            metrics[event.step - 1] = Recorded(where=event.read_from, values=event.data).numbers("metrics")
    if started is None:
        raise RunFolderError(f"{file}: it records no start of a run; there is nothing to show yet.")
    recorded = Recorded(where=started.read_from, values=started.data)
    steps = saved_steps(folder)
    if not steps:
        every = recorded.section("resolved").section("run").values.get("media_every")
        reason = (
            "run.media_every is 0. Set it to N to save those of every Nth step."
            if every == 0
            else f"run.media_every={every} saves those of its first step once they are scored; see the end of {file}."
        )
        raise RunFolderError(f"{folder}: the run has no saved samples. {reason}")
    return SavedRun(folder=folder, name=recorded.text("name"), started=recorded, steps=tuple(steps), metrics=metrics)


def _events(file: Path) -> list[Event]:
    try:
        return read_events(file)
    except (ValueError, OSError) as error:
        raise RunFolderError(f"{error}") from error
