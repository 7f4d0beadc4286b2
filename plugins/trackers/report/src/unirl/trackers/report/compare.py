"""Before and after: what the same held-out prompts gave at the first and at the last evaluation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .history import RunHistory
from .media import MediaKind, Sample, SampleBatch

__all__ = ["Change", "Pair", "Pairs", "held_out_changes", "pair_samples"]

_Question = tuple[str, tuple[Path, ...]]
GOALS = ("score_mean", "share_at_threshold")
"""Held-out numbers of which more is better."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A number at two times."""

    metric: str
    before: float
    after: float

    @property
    def is_goal(self) -> bool:
        """Whether more is better: true of what is trained on; a component of a reward may be a penalty or a length."""
        return self.metric.rpartition("/")[2] in GOALS and not self.metric.startswith("reward/")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One prompt and noise, under the first and the last evaluated weights."""

    prompt: str
    before: Sample
    after: Sample


@dataclass(frozen=True, kw_only=True)
class Pairs:
    before_step: int
    after_step: int
    shown: tuple[Pair, ...]
    num_held_out: int
    """Held-out samples of the last evaluation, shown or not."""


def held_out_changes(history: RunHistory) -> list[Change]:
    """Every held-out number of the last evaluation that the first one has as well."""
    if not history.evaluations:
        return []
    first, last = history.evaluations[0].metrics, history.evaluations[-1].metrics
    return [Change(metric=key, before=first[key], after=last[key]) for key in last if key in first]


def pair_samples(history: RunHistory, kind: MediaKind, *, limit: int) -> Pairs | None:
    """The first `limit` held-out samples of both evaluations, in their own order and every prompt before any repeats.

    Nothing is picked by its looks or reward. None when no evaluation has samples of this kind. After one evaluation
    only, both sides are the same.
    """
    batches = history.batches(kind, "eval")
    if not batches:
        return None
    first, last = batches[0], batches[-1]
    before = dict(_numbered(first))
    pairs = [
        (at, Pair(prompt=sample.prompt, before=before[at], after=sample))
        for at, sample in _numbered(last)
        if at in before
    ]
    # The sort is stable, so each round keeps the order of the file.
    pairs.sort(key=lambda item: item[0][1])
    return Pairs(
        before_step=first.step,
        after_step=last.step,
        shown=tuple(pair for _, pair in pairs[:limit]),
        num_held_out=len(last.samples) + last.num_left_out,
    )


def _numbered(batch: SampleBatch) -> list[tuple[tuple[_Question, int], Sample]]:
    """Samples by their prompt and how many of it came before: the noise of a sample follows from both."""
    seen: Counter[_Question] = Counter()
    numbered: list[tuple[tuple[_Question, int], Sample]] = []
    for sample in batch.samples:
        numbered.append(((sample.question, seen[sample.question]), sample))
        seen[sample.question] += 1
    return numbered
