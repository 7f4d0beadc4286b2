"""What each stage of a rollout is made from: the prompt, and what the stages above it gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unirl.core.errors import BatchError
from unirl.core.roles import diffusion_model
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.media import save_images

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.specs.plan import Plan, Stage
    from unirl.core.specs.spec import MediaRole
    from unirl.core.types.request import Request
    from unirl.core.types.track import TextSegment, Track

__all__ = ["Lineage", "cut_texts", "fallbacks"]


class Lineage:
    """The tracks of a rollout, parents first, and the inputs of a stage below those that are there."""

    def __init__(self, plan: Plan, requests: Mapping[str, Request], *, folder: Callable[[], Path]) -> None:
        """requests: of the stages made from prompts.  folder: gives the one for images that stages are made from."""
        self.tracks: dict[str, Track] = {}
        self._plan = plan
        self._folder = folder
        self._prompts = {
            name: dict(zip(request.sample_ids, request.inputs.media, strict=True)) for name, request in requests.items()
        }
        self._rows: dict[str, dict[str, int]] = {}
        self._saved: dict[tuple[str, str], Sequence[tuple[MediaRef, ...]]] = {}
        self._tokens: dict[str, list[tuple[int, ...]]] = {}

    def add(self, name: str, track: Track) -> None:
        self.tracks[name] = track
        self._rows[name] = {sample: row for row, sample in enumerate(track.sample_ids)}

    def prompt_ids(self, stage: str) -> tuple[str, ...]:
        """The group of the root sample behind each sample of a stage."""
        lines = [self._line(stage, row)[0] for row in range(self.tracks[stage].num_rows)]
        return tuple(self.tracks[root].group_ids[row] for root, row in lines)

    def inputs(self, stage: Stage) -> Inputs:
        """The inputs of a stage for each sample of its parent, whose ids they have.

        Raises BatchError for a parent without texts, or without images.
        """
        parent = self.tracks[cast("str", stage.parent)]
        lines = [self._line(parent.name, row) for row in range(parent.num_rows)]
        prompts, instruction = parent.inputs.prompts, stage.settings.instruction
        turns: tuple[tuple[Turn, ...], ...] | None = None
        if stage.continues:
            texts = prompts
            asked = [Turn(stage=stage.name, text=instruction.replace("{prompt}", prompt)) for prompt in prompts]
            turns = tuple(
                (*(self._turn(stage, name, row) for name, row in line), *([last] if instruction else []))
                for line, last in zip(lines, asked, strict=True)
            )
        elif self._is_image(parent.name):
            texts = tuple(instruction.replace("{prompt}", prompt) or prompt for prompt in prompts)
        elif parent.media is not None:
            texts = parent.media.texts
            if marker := stage.settings.marker:
                texts = tuple(_marked(text, marker) or prompt for text, prompt in zip(texts, prompts, strict=True))
        else:
            raise BatchError(f"stage {stage.name!r}: its parent {parent.name!r} gave no texts to go on from.")
        return Inputs(
            ids=parent.sample_ids,
            prompts=prompts,
            texts=texts,
            media=tuple(self._media(stage, line) for line in lines),
            turns=turns,
        )

    def _line(self, name: str, row: int) -> list[tuple[str, int]]:
        """A sample and those it descends from, as stages and rows, the root first."""
        line = [(name, row)]
        while (above := self._plan.stage(name).parent) is not None:
            sample = cast("tuple[str, ...]", self.tracks[name].parent_ids)[row]
            name, row = above, self._rows[above][sample]
            line.append((name, row))
        return line[::-1]

    def _media(self, stage: Stage, line: Sequence[tuple[str, int]]) -> tuple[MediaRef, ...]:
        """The prompt's media that a stage takes, and the images above it that it is shown."""
        root, row = line[0]
        given = self._prompts[root][self.tracks[root].sample_ids[row]]
        shown: list[MediaRef] = []
        if not stage.continues:
            names = {*stage.settings.shows, stage.parent}
            for name, at in line:
                if name in names and self._is_image(name):
                    shown += self._images(name, stage.parent_role)[at]
        roles = stage.model.spec.inputs.get(stage.track, {})
        replaced = {ref.role for ref in shown if roles.get(cast("MediaRole", ref.role)) == "needs one"}
        return (*(ref for ref in given if ref.role in stage.takes - replaced), *shown)

    def _turn(self, stage: Stage, name: str, row: int) -> Turn:
        """What a stage above gave to this one."""
        track, made = self.tracks[name], self._plan.stage(name)
        if self._is_image(name):
            return Turn(stage=name, media=self._images(name, "source")[row])
        texts = track.media.texts if track.media is not None else ("",) * track.num_rows
        # Tokens of another model mean nothing to this one.
        is_own = made.learner.name == stage.learner.name
        return Turn(stage=name, text=texts[row], tokens=self._sampled(name)[row] if is_own else ())

    def _sampled(self, name: str) -> list[tuple[int, ...]]:
        if name not in self._tokens:
            segment = cast("TextSegment", self.tracks[name].segment)
            self._tokens[name] = [tuple(cast("Any", row).tolist()) for row in segment.tokens]
        return self._tokens[name]

    def _images(self, name: str, role: str) -> Sequence[tuple[MediaRef, ...]]:
        if (name, role) not in self._saved:
            self._saved[name, role] = save_images(self.tracks[name].media, self._folder(), role=role)
        return self._saved[name, role]

    def _is_image(self, name: str) -> bool:
        return self._plan.stage(name).medium == "image"


def fallbacks(tracks: Mapping[str, Track], plan: Plan) -> dict[str, float]:
    """Metrics: the share of the texts above each stage with a marker that the prompt replaces."""
    metrics: dict[str, float] = {}
    for stage in plan.stages:
        if stage.parent is not None and stage.settings.marker:
            media = tracks[stage.parent].media
            texts = media.texts if media is not None else ()
            lost = sum(not _marked(text, stage.settings.marker) for text in texts)
            metrics[f"{plan.prefix(stage)}fallbacks"] = lost / max(1, len(texts))
    return metrics


def cut_texts(
    tracks: Mapping[str, Track], plan: Plan, models: Mapping[str, Model], *, evaluates: bool = False
) -> dict[str, float]:
    """Metrics: the share of the texts that a stage above wrote which are longer than the stage's encoder reads.
    models: of the learners, by name.  evaluates: with the sampling of evaluation."""
    metrics: dict[str, float] = {}
    for stage in plan.stages:
        sampling = stage.evaluation if evaluates else stage.sampling
        is_written = stage.parent is not None and plan.stage(stage.parent).medium == "text" and not stage.continues
        if isinstance(sampling, LatentSamplingConfig) and is_written:
            texts = tracks[stage.name].inputs.texts
            cut = diffusion_model(models[stage.learner.name]).num_cut(texts, sampling=sampling)
            if cut is not None:
                metrics[f"{plan.prefix(stage)}cut_texts"] = cut / max(1, len(texts))
    return metrics


def _marked(text: str, marker: str) -> str:
    """The text after the last marker; "" without one."""
    return text.rpartition(marker)[2].strip() if marker in text else ""
