"""Compares the states and numbers of two reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..claims import TIERS
from ..results import Outcome, Report
from ..verdicts import Number
from .words import SYMBOLS, count_of, number

__all__ = ["FACTOR", "Change", "Diff", "Direction", "compare", "print_diff"]

FACTOR = 10.0
"""A number is listed if it changed by more than this factor: rounding differs between machines, its order does not."""

Direction = Literal["worse", "better", "other"]
"""`other`: neither, such as a capability that is no longer declared."""
Key = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A claim on a subject whose state changed, is new, or is gone."""

    old: Outcome | None
    new: Outcome | None
    is_withdrawn: bool = False
    """Whether it is gone because it does not apply any more."""

    @property
    def direction(self) -> Direction:
        """Worse: a new failure, and whatever passed and does not pass now, unless it does not apply any more."""
        if self.new is not None and self.new.state in ("fail", "pass"):
            return "worse" if self.new.state == "fail" else "better"
        has_passed = self.old is not None and self.old.state == "pass"
        return "worse" if has_passed and not self.is_withdrawn else "other"

    def __str__(self) -> str:
        one = self.new or self.old
        assert one is not None
        was = f"{SYMBOLS[self.old.state]} {self.old.state}" if self.old else "new"
        gone = f"{SYMBOLS['n/a']} n/a" if self.is_withdrawn else "no longer tested"
        now = f"{SYMBOLS[self.new.state]} {self.new.state}" if self.new else gone
        reason = f": {self.new.reason}" if self.new and self.new.reason else ""
        return f"{was} -> {now}  {one.claim} on {one.kind} {one.subject}{reason}"


@dataclass(frozen=True, kw_only=True)
class Diff:
    notes: tuple[str, ...]
    """Differences between the runs as a whole: tier, environment."""
    changes: tuple[Change, ...]
    numbers: tuple[str, ...]
    """A line for each number that changed by more than the factor, or has another bound."""
    num_not_covered: int
    """Outcomes of the old report outside of the new run: of a higher tier, or not selected."""

    def in_direction(self, direction: Direction) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.direction == direction)

    @property
    def got_worse(self) -> bool:
        return bool(self.in_direction("worse"))


def compare(old: Report, new: Report) -> Diff:
    """Changes from one report to another, by claim, kind and subject."""
    before, after = _by_key(old), _by_key(new)
    coverage = _Coverage(old, new)
    gone = [was for key, was in before.items() if key not in after]
    covered = [was for was in gone if coverage.has(was)]
    both = [(was, after[key]) for key, was in before.items() if key in after]
    return Diff(
        notes=tuple(_notes(old, new)),
        changes=(
            *(Change(old=was, new=now) for was, now in both if was.state != now.state),
            *(Change(old=was, new=None, is_withdrawn=coverage.is_withdrawn(was)) for was in covered),
            *(Change(old=None, new=now) for key, now in after.items() if key not in before),
        ),
        numbers=tuple(line for was, now in both for line in _moved(was, now)),
        num_not_covered=len(gone) - len(covered),
    )


def _by_key(report: Report) -> Mapping[Key, Outcome]:
    return {(one.claim, one.kind, one.subject): one for one in report.outcomes}


class _Coverage:
    """Why the new run has no outcome for one of the old: outside of the run, not applicable, or lost."""

    def __init__(self, old: Report, new: Report) -> None:
        self._new = new
        self._claims = {claim.name for claim in new.claims}
        self._tiers = {claim.name: TIERS.index(claim.tier) for claim in old.claims}
        self._subjects = {(subject.kind, subject.id): subject for subject in old.subjects}
        self._chosen = {(subject.kind, subject.id) for subject in new.subjects}
        self._parts = {part for subject in new.subjects for part in subject.names.items()}
        self._tier = TIERS.index(new.tier)
        self._is_lower = self._tier < TIERS.index(old.tier)

    def has(self, was: Outcome) -> bool:
        """Whether the new run is about this outcome: by its tier and its selection."""
        device = self._subjects[was.kind, was.subject].device
        if self._tiers[was.claim] > self._tier or (device == "cuda" and self._tier < TIERS.index("gpu")):
            return False
        # Lower tiers leave combinations out.
        may_lack = self._new.selection or (was.kind == "cell" and self._is_lower)
        if may_lack and (was.kind, was.subject) not in self._chosen:
            return False
        is_left_out = f"--without={was.claim}" in self._new.selection
        is_chosen = not is_left_out and not any(each.startswith("--claim=") for each in self._new.selection)
        return was.claim in self._claims or is_chosen

    def is_withdrawn(self, was: Outcome) -> bool:
        """Whether the new run makes the claim and has all of the parts: then it is n/a, or they are incompatible."""
        subject = self._subjects[was.kind, was.subject]
        is_absent = any(one.state == "not run" and one.device == subject.device for one in self._new.untried)
        return not is_absent and was.claim in self._claims and self._parts.issuperset(subject.names.items())


def _moved(was: Outcome, now: Outcome) -> Iterable[str]:
    for old, new in zip(was.numbers, now.numbers, strict=False):
        if old.name == new.name and (old.bound != new.bound or _ratio(old.value, new.value) > FACTOR):
            bounds = [_bound(old), _bound(new)]
            yield (
                f"{now.claim} on {now.kind} {now.subject}: {new.name} {number(old.value)} -> {number(new.value)}, "
                f"{bounds[0] if old.bound == new.bound else ' -> '.join(bounds)}"
            )


def _bound(one: Number) -> str:
    return "no bound" if one.bound is None else f"at most {number(one.bound)}"


def _ratio(first: float, second: float) -> float:
    """The larger of two sizes, divided by the smaller; 1 for two that are not numbers."""
    if math.isnan(first) or math.isnan(second):
        return 1.0 if math.isnan(first) and math.isnan(second) else math.inf
    low, high = sorted((abs(first), abs(second)))
    if low == high:
        return 1.0
    return math.inf if low == 0 or math.isinf(high) else high / low


def _notes(old: Report, new: Report) -> Iterable[str]:
    before, after = _facts(old), _facts(new)
    for name in [*after, *(name for name in before if name not in after)]:
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name, 'absent')} before, {after.get(name, 'absent')} now"


def _facts(report: Report) -> dict[str, str]:
    here = report.environment
    many = {"package": here.packages, "engine": here.engines, "dist": report.dists}
    return {
        "tier": report.tier,
        **{name: str(getattr(here, name)) for name in ("python", "platform", "num_cpus", "cpu", "batch_invariant")},
        "GPU": ", ".join(here.devices) or "none",
        **{f"{kind} {name}": text for kind, texts in many.items() for name, text in sorted(texts.items())},
    }


def print_diff(diff: Diff, *, stderr: bool = False) -> None:
    """Show the changes to a person."""
    from rich.text import Text
    from unirl.core.cli.output import console

    out = console(stderr=stderr)
    # Regressions come last: of a long list people see the end.
    sections: tuple[tuple[str, str, Iterable[object]], ...] = (
        ("Changes since the given report", "bold", diff.notes),
        (f"numbers that changed {number(FACTOR)}-fold, or have another bound", "bold", diff.numbers),
        ("better", "green", diff.in_direction("better")),
        ("neither worse nor better", "bold", diff.in_direction("other")),
        ("worse", "bold red", diff.in_direction("worse")),
    )
    for place, (title, style, lines) in enumerate(sections):
        if lines or not place:
            out.print(Text(f"\n{title}", style=style))
        for line in lines:
            out.print(Text(f"  {line}", style="" if place else "dim"), soft_wrap=True)
    if diff.num_not_covered:
        text = f"\n{count_of(diff.num_not_covered, 'outcome')} of the given report are outside of this run."
        out.print(Text(text, style="dim"))
    counts = [f"{len(diff.in_direction(direction))} {direction}" for direction in ("worse", "better", "other")]
    out.print(Text(f"\n{', '.join(counts)}." if diff.changes else "\nNo state changed.", style="bold"))
