"""Compares two reports: regressions, improvements, new and removed outcomes, changed numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..claims import TIERS
from ..results import Outcome, Report
from ..verdicts import Number, State
from .words import SYMBOLS, count_of, number

if TYPE_CHECKING:
    from ..subjects import Selection

__all__ = ["FACTOR", "Change", "Diff", "Direction", "NumberChange", "compare", "print_diff"]

FACTOR = 10.0
"""A number is reported if it changed by more than this factor: rounding differs between machines, its order does
not."""

Direction = Literal["worse", "better", "other"]
"""`other`: neither, such as a promise that was made or withdrawn."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One claim about one subject whose outcome changed, is new, or was removed."""

    direction: Direction
    old: Outcome | None
    """None: it is new."""
    new: Outcome | None
    """None: it is gone."""
    why: str = ""
    """What it means, where the two states do not say it."""

    @property
    def outcome(self) -> Outcome:
        result = self.new or self.old
        assert result is not None
        return result


@dataclass(frozen=True, kw_only=True)
class NumberChange:
    outcome: Outcome
    """The new one."""
    old: Number
    new: Number


@dataclass(frozen=True, kw_only=True)
class Diff:
    notes: tuple[str, ...]
    """Differences between the runs as a whole: tier, suite, environment."""
    changes: tuple[Change, ...]
    numbers: tuple[NumberChange, ...]
    factor: float
    num_not_covered: int
    """Outcomes of the old report that the new run was not about: a higher tier, or outside of what was selected."""

    def in_direction(self, direction: Direction) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.direction == direction)

    @property
    def got_worse(self) -> bool:
        """Whether what passed fails, is a gap, was not run or is gone, or a failure came up."""
        return bool(self.in_direction("worse"))


Key = tuple[str, str, str]


def compare(old: Report, new: Report, *, selected: Selection | None = None, factor: float = FACTOR) -> Diff:
    """Changes from one report to another, by claim, kind and subject.

    selected: the selection of the new run, so that unselected claims do not count as removed.
    """
    before, after = _by_key(old), _by_key(new)
    covered = _Coverage(old, new, selected)
    changes: list[Change] = []
    numbers: list[NumberChange] = []
    num_not_covered = 0
    for key, was in before.items():
        result = after.get(key)
        if result is not None:
            changes += _changed(was, result)
            numbers += _moved(was, result, factor)
        elif covered(was):
            changes.append(_gone(was))
        else:
            num_not_covered += 1
    changes += [_come(result) for key, result in after.items() if key not in before]
    return Diff(
        notes=tuple(_notes(old, new)),
        changes=tuple(changes),
        numbers=tuple(numbers),
        factor=factor,
        num_not_covered=num_not_covered,
    )


def _by_key(report: Report) -> Mapping[Key, Outcome]:
    return {(o.claim, o.kind, o.subject): o for o in report.outcomes}


class _Coverage:
    """Whether the new run would have tried what the old one did, were it still there."""

    def __init__(self, old: Report, new: Report, selected: Selection | None) -> None:
        self._tiers = {claim.name: claim.tier for claim in old.claims}
        self._devices = {(subject.kind, subject.id): subject.device for subject in old.subjects}
        self._chosen = {(subject.kind, subject.id) for subject in new.subjects}
        self._tier = new.tier
        self._is_lower = TIERS.index(new.tier) < TIERS.index(old.tier)
        self._selected = selected
        self._has_parts = selected is not None and bool(
            selected.plugins or selected.kinds or selected.without or any(selected.names.values())
        )

    def __call__(self, was: Outcome) -> bool:
        if TIERS.index(self._tiers[was.claim]) > TIERS.index(self._tier):
            return False
        if self._devices[was.kind, was.subject] == "cuda" and TIERS.index(self._tier) < TIERS.index("gpu"):
            return False
        is_chosen = (was.kind, was.subject) in self._chosen
        if was.kind == "cell" and self._is_lower and not is_chosen:
            # Lower tiers leave cells out; where a part is gone, claims about it alone are gone, too.
            return False
        if self._has_parts and not is_chosen:
            return False
        return self._selected is None or not self._selected.claims or was.claim in self._selected.claims


WITHDRAWN = "it is no longer promised, or the parts no longer go together"

_MEANINGS: Mapping[tuple[State, State], tuple[Direction, str]] = {
    ("pass", "fail"): ("worse", ""),
    ("pass", "not run"): ("worse", "it was proven, and now nothing is known"),
    ("pass", "gap"): ("worse", "it held, and now fails as declared"),
    ("pass", "n/a"): ("other", WITHDRAWN),
    ("fail", "pass"): ("better", ""),
    ("fail", "gap"): ("other", "the failure is declared now"),
    ("fail", "not run"): ("other", "it failed, and now nothing is known"),
    ("fail", "n/a"): ("other", WITHDRAWN),
    ("gap", "pass"): ("better", ""),
    ("gap", "fail"): ("worse", "the gap is no longer declared, or the claim passes and the declaration still stands"),
    ("gap", "not run"): ("other", "it was a gap, and now nothing is known"),
    ("gap", "n/a"): ("other", WITHDRAWN),
    ("not run", "pass"): ("better", ""),
    ("not run", "fail"): ("worse", "a failure that was not known"),
    ("not run", "gap"): ("other", "it was tried, and fails as declared"),
    ("not run", "n/a"): ("other", WITHDRAWN),
    ("n/a", "pass"): ("better", "it is promised now, and kept"),
    ("n/a", "fail"): ("worse", "it is promised now, and not kept"),
    ("n/a", "gap"): ("other", "it is promised now, with a declared gap"),
    ("n/a", "not run"): ("other", "it is promised now, and was not tried"),
}


def _changed(was: Outcome, found: Outcome) -> list[Change]:
    if was.state == found.state:
        return []
    direction, why = _MEANINGS[was.state, found.state]
    return [Change(direction=direction, old=was, new=found, why=why)]


def _gone(was: Outcome) -> Change:
    if was.state == "pass":
        return Change(direction="worse", old=was, new=None, why="it passed, and is no longer tried")
    return Change(direction="other", old=was, new=None)


def _come(found: Outcome) -> Change:
    directions: dict[State, Direction] = {"fail": "worse", "pass": "better"}
    return Change(direction=directions.get(found.state, "other"), old=None, new=found)


def _moved(was: Outcome, found: Outcome, factor: float) -> Iterable[NumberChange]:
    before = {one.name: one for one in was.numbers}
    for one in found.numbers:
        known = before.get(one.name)
        if known is not None and (known.bound != one.bound or _ratio(known.value, one.value) > factor):
            yield NumberChange(outcome=found, old=known, new=one)


def _ratio(first: float, second: float) -> float:
    """How many times the larger one is the smaller one, by size; 1 for two that are no numbers."""
    if math.isnan(first) or math.isnan(second):
        return 1.0 if math.isnan(first) and math.isnan(second) else math.inf
    low, high = sorted((abs(first), abs(second)))
    if low == high:
        return 1.0
    return math.inf if low == 0 or math.isinf(high) else high / low


def _notes(old: Report, new: Report) -> Iterable[str]:
    if old.tier != new.tier:
        yield f"tier: {old.tier} before, {new.tier} now"
    if old.suite != new.suite:
        yield f"suite: {old.suite} before, {new.suite} now; claims may have changed under the same name"
    was, result = old.environment, new.environment
    for title, first, second in (
        ("Python", was.python, result.python),
        ("platform", was.platform, result.platform),
        ("CPUs", was.num_cpus, result.num_cpus),
        ("CPU", was.cpu, result.cpu),
        ("batch-invariant numerics", was.batch_invariant, result.batch_invariant),
        ("GPU", ", ".join(was.devices) or "none", ", ".join(result.devices) or "none"),
    ):
        if first != second:
            yield f"{title}: {first} before, {second} now"
    for title, first, second in (
        ("package", was.packages, result.packages),
        ("engine", was.engines, result.engines),
        ("dist", old.dists, new.dists),
    ):
        for name in sorted(first.keys() | second.keys()):
            if first.get(name) != second.get(name):
                yield f"{title} {name}: {first.get(name, 'absent')} before, {second.get(name, 'absent')} now"


def print_diff(diff: Diff, *, stderr: bool = False) -> None:
    """Show what changed to a person."""
    from rich.text import Text
    from unirl.core.cli.output import console

    out = console(stderr=stderr)
    out.print()
    out.print(Text("Changes since the report given", style="bold"))
    for note in diff.notes:
        out.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    if diff.numbers:
        out.print(Text(f"\nnumbers that moved by more than {number(diff.factor)} times, or have another bound", "bold"))
    for moved in diff.numbers:
        one = moved.outcome
        text = f"  {one.claim} on {one.kind} {one.subject}: {moved.new.name} {_pair(moved.old, moved.new)}"
        out.print(Text(text), soft_wrap=True)
    # What is worse comes last: of a long list people see the end.
    titles: tuple[tuple[Direction, str, str], ...] = (
        ("better", "better", "green"),
        ("other", "neither worse nor better", ""),
        ("worse", "worse", "bold red"),
    )
    for direction, title, style in titles:
        result = diff.in_direction(direction)
        if result:
            out.print(Text(f"\n{title}: {len(result)}", style=style or "bold"))
        for change in result:
            out.print(Text(f"  {_line(change)}"), soft_wrap=True)
    if diff.num_not_covered:
        text = f"\n{count_of(diff.num_not_covered, 'outcome')} of the report given: not what this run was about."
        out.print(Text(text, style="dim"))
    counts: dict[Direction, int] = {direction: len(diff.in_direction(direction)) for direction, _, _ in titles}
    out.print()
    if not any(counts.values()):
        out.print(Text("No state changed.", style="bold"))
    else:
        out.print(Text(f"{counts['worse']} worse, {counts['better']} better, {counts['other']} other.", style="bold"))


def _line(change: Change) -> str:
    one = change.outcome
    was = f"{SYMBOLS[change.old.state]} {change.old.state}" if change.old else "new"
    now = f"{SYMBOLS[change.new.state]} {change.new.state}" if change.new else "gone"
    reply = "; ".join(text for text in (change.why, change.new.reason if change.new else "") if text)
    return f"{was} -> {now}  {one.claim} on {one.kind} {one.subject}" + (f": {reply}" if reply else "")


def _pair(old: Number, new: Number) -> str:
    moved = f"{number(old.value)} -> {number(new.value)}"
    if old.bound == new.bound:
        return moved + ("" if new.bound is None else f", at most {number(new.bound)}")
    return f"{moved}, bound {_bound(old)} -> {_bound(new)}"


def _bound(one: Number) -> str:
    return "none" if one.bound is None else number(one.bound)
