"""Families: samples of the first stage of a run, each with what later stages made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .history import RunHistory
from .media import Sample, SampleBatch

__all__ = ["Branch", "Family", "HeldOut", "families", "held_out_families", "sample_families"]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A sample and what was made from it."""

    stage: str
    sample: Sample
    is_text: bool
    branches: tuple[Branch, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One prompt and the samples made from it."""

    prompt: str
    inputs: tuple[Path, ...]
    """Images that it refers to."""
    branches: tuple[Branch, ...]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Samples of the same held-out prompts at the first and at the last evaluation."""

    before_step: int
    after_step: int
    shown: tuple[tuple[Family, Family], ...]


def families(history: RunHistory, key: Literal["train", "eval"]) -> dict[int, list[Family]]:
    """Step -> the prompts of its samples, in their order. Empty for a run of one stage."""
    return sample_families([batch for batch in history.media if batch.key.startswith(f"{key}/")])


def sample_families(batches: Iterable[SampleBatch]) -> dict[int, list[Family]]:
    """Step -> the prompts of these samples, in their order. A sample of a run of one stage has no name of a stage."""
    steps: dict[int, list[tuple[str, Sample, bool]]] = {}
    for batch in batches:
        stage = batch.key.partition("/")[2]
        steps.setdefault(batch.step, []).extend((stage, one, batch.kind == "texts") for one in batch.samples)
    return {step: _families(samples) for step, samples in steps.items()}


def held_out_families(history: RunHistory, *, limit: int) -> HeldOut | None:
    """The first prompts of the first and the last evaluation, up to `limit` samples of the first stage. None for a run
    of one stage."""
    steps = families(history, "eval")
    if not steps:
        return None
    first, last = min(steps), max(steps)
    before = {(family.prompt, family.inputs): family for family in steps[first]}
    shown: list[tuple[Family, Family]] = []
    room = limit
    for family in steps[last]:
        asked = (family.prompt, family.inputs)
        if asked in before and room > 0:
            shown.append((before[asked], family))
            room -= len(family.branches)
    return HeldOut(before_step=first, after_step=last, shown=tuple(shown))


def _families(samples: list[tuple[str, Sample, bool]]) -> list[Family]:
    made: dict[Path | None, list[tuple[str, Sample, bool]]] = {}
    for item in samples:
        made.setdefault(item[1].parent, []).append(item)

    def branches(parent: Path | None, asked: tuple[str, tuple[Path, ...]] | None = None) -> tuple[Branch, ...]:
        return tuple(
            Branch(stage=stage, sample=sample, is_text=is_text, branches=branches(sample.file))
            for stage, sample, is_text in made.get(parent, [])
            if asked is None or sample.question == asked
        )

    questions = dict.fromkeys(sample.question for _, sample, _ in made.get(None, []))
    return [Family(prompt=asked[0], inputs=asked[1], branches=branches(None, asked)) for asked in questions]
