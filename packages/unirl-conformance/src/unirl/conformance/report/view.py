"""A report seen as tables: outcomes by subject, grids of models, engines and algorithms, numbers, reasons.

All shown data is computed here once; the terminal, MATRIX.md and the page only format it.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unirl.core.specs.capability import Cap

from ..claims import TIERS, Claim, SubjectKind
from ..results import Outcome, Report, SubjectInfo, Untried
from ..verdicts import STATES, Number, State
from .words import KIND_TITLES, PARTLY, SEVERITY, SYMBOLS, count_of, share_of_bound

__all__ = [
    "TRACKS",
    "Cell",
    "CellTable",
    "Grid",
    "NumberRow",
    "SubjectRow",
    "Tally",
    "View",
    "nearest_number",
    "subject_counts",
]

MISMATCH = ("log-prob gap", "largest log-ratio")
"""How numbers begin that say how far rollout and replay are apart."""

TRACKS: Mapping[str, str] = {"latent": "Diffusion models", "text": "Language models"}
"""Kinds of tracks and what their models are called."""


@dataclass(frozen=True)
class Tally:
    """How many outcomes ended in each state."""

    counts: tuple[int, ...]
    """Counts in the order of `STATES`."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], untried: Iterable[Untried] = ()) -> Tally:
        counts = dict.fromkeys(STATES, 0)
        for one in outcomes:
            counts[one.state] += 1
        for one in untried:
            counts[one.state] += one.num_claims
        return cls(tuple(counts.values()))

    def __getitem__(self, state: State) -> int:
        return self.counts[STATES.index(state)]

    @property
    def state(self) -> State:
        """The gravest state that occurs, so that only what ran as a whole and holds is a pass."""
        for state in SEVERITY:
            if self[state]:
                return state
        return "n/a"

    @property
    def symbol(self) -> str:
        """The same as a glyph, with a separate one for subjects that passed in part and did not run otherwise."""
        if self["not run"] and self["gap"] and not self["fail"]:
            return SYMBOLS["gap"]
        return PARTLY if self.state == "not run" and self["pass"] else SYMBOLS[self.state]

    @property
    def tried(self) -> int:
        """All that are not n/a."""
        return sum(self.counts) - self["n/a"]

    def __str__(self) -> str:
        """`pass`, `not run`, `1 of 12 fail`: the state, and of how many where some ended otherwise."""
        state = self.state
        return state if self[state] == self.tried or state == "n/a" else f"{self[state]} of {self.tried} {state}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Outcomes that are shown together."""

    outcomes: Sequence[Outcome]

    @cached_property
    def tally(self) -> Tally:
        return Tally.of(self.outcomes)

    @cached_property
    def mismatch(self) -> Number | None:
        """The log-prob mismatch that comes nearest to its bound, or None when none was measured."""
        numbers = (one for outcome in self.outcomes for one in outcome.numbers if one.name.startswith(MISMATCH))
        return max(numbers, key=_nearness, default=None)


@dataclass(frozen=True, kw_only=True)
class SubjectRow(Cell):
    """A subject with its outcomes, in the order of the claims."""

    subject: SubjectInfo


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All claims about models of one kind of track: on their own, with each engine and with each algorithm.

    A cell has all outcomes of its model with that engine, or with that algorithm on any engine and backend.
    """

    title: str
    models: tuple[str, ...]
    groups: Mapping[str, Mapping[str, tuple[Cell | None, ...]]]
    """Title of each group of rows -> name of each row -> one cell for each model; None where nothing applies."""


@dataclass(frozen=True, kw_only=True)
class CellTable:
    """Models of one kind of track and engines against algorithms, on one backend and device."""

    track: str
    backend: str
    device: str
    algorithms: tuple[str, ...]
    rows: Mapping[tuple[str, str], tuple[SubjectRow | None, ...]]
    """(model, engine) -> one subject for each algorithm; None where they are incompatible."""


@dataclass(frozen=True, kw_only=True)
class NumberRow:
    """The numbers of a claim over all subjects that they were measured on."""

    claim: str
    worst: Number
    """The one nearest to its bound; without bounds the largest."""
    where: Outcome
    """Outcome with the worst number."""
    num_numbers: int


class View:
    """Everything that is shown of a report."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._claims = {claim.name: claim for claim in report.claims}
        self._subjects = {(subject.kind, subject.id): subject for subject in report.subjects}

    def claim(self, outcome: Outcome) -> Claim:
        return self._claims[outcome.claim]

    def subject(self, outcome: Outcome) -> SubjectInfo:
        return self._subjects[outcome.kind, outcome.subject]

    @cached_property
    def total(self) -> Tally:
        return Tally.of(self.report.outcomes, self.report.untried)

    @cached_property
    def rows(self) -> tuple[SubjectRow, ...]:
        """Every subject with outcomes, in the order of the report."""
        result: dict[tuple[str, str], list[Outcome]] = {}
        for one in self.report.outcomes:
            result.setdefault((one.kind, one.subject), []).append(one)
        return tuple(
            SubjectRow(subject=subject, outcomes=tuple(result[key]))
            for key, subject in self._subjects.items()
            if key in result
        )

    def of_kind(self, kind: SubjectKind, *, track: str = "") -> tuple[SubjectRow, ...]:
        """Subjects of a kind; with `track`, those that are tried on it."""
        return tuple(
            row for row in self.rows if row.subject.kind == kind and (not track or track in row.subject.tracks)
        )

    @property
    def kinds(self) -> tuple[SubjectKind, ...]:
        """Kinds of subjects that something was tried on: those of parts first."""
        there = {row.subject.kind for row in self.rows}
        return tuple(kind for kind in KIND_TITLES if kind in there)

    @property
    def dists(self) -> tuple[str, ...]:
        """Dists that a claim was tried on."""
        return tuple(sorted({dist for row in self.rows for dist in row.subject.dists}))

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        tally = self.total
        if tally["fail"]:
            return f"{count_of(tally['fail'], 'claim fails', 'claims fail')}."
        if not tally["pass"] and not tally["gap"]:
            return "Nothing could be tested here." if tally["not run"] else "No claim applies to the selection."
        rest = [f"{tally['not run']:,} not run"] if tally["not run"] else []
        rest += [count_of(tally["gap"], "declared gap")] if tally["gap"] else []
        return f"Nothing fails{': ' if rest else '.'}{' and '.join(rest)}{'.' if rest else ''}"

    def with_state(self, state: State) -> tuple[Outcome, ...]:
        """Outcomes in a state: those of parts first, packaging last."""
        kinds = list(KIND_TITLES)
        found = (one for one in self.report.outcomes if one.state == state)
        return tuple(sorted(found, key=lambda one: kinds.index(one.kind)))

    @cached_property
    def not_run(self) -> dict[str, list[Outcome]]:
        """Reason -> outcomes that were not run for it, most frequent first."""
        return dict(sorted(self.by_reason("not run").items(), key=lambda pair: (-len(pair[1]), pair[0])))

    def by_reason(self, state: State) -> dict[str, list[Outcome]]:
        """Reason -> outcomes that are in a state for it, in the order of the report."""
        result: dict[str, list[Outcome]] = {}
        for one in self.with_state(state):
            result.setdefault(one.reason, []).append(one)
        return result

    def untried(self, state: State) -> dict[str, int]:
        """Reason -> claims without an outcome that are in a state for it, most frequent first."""
        result: dict[str, int] = {}
        for one in self.report.untried:
            if one.state == state:
                result[one.reason] = result.get(one.reason, 0) + one.num_claims
        return dict(sorted(result.items(), key=lambda pair: (-pair[1], pair[0])))

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """Models alone, with engines and with algorithms: one for each kind of track."""
        return tuple(grid for track, title in TRACKS.items() if (grid := self._grid(track, title)).models)

    def _grid(self, track: str, title: str) -> Grid:
        rows = [row for row in self.rows if "model" in row.subject.names and track in row.subject.tracks]
        models = tuple(sorted({row.subject.names["model"] for row in rows}))
        groups: dict[str, dict[str, tuple[Cell | None, ...]]] = {}
        for kind, head in (("model", ""), ("engine", "engine"), ("cell", "algorithm")):
            cells: dict[str, dict[str, list[Outcome]]] = {}
            for row in rows:
                if row.subject.kind == kind:
                    own = cells.setdefault({"": "model alone", **row.subject.names}[head], {})
                    own.setdefault(row.subject.names["model"], []).extend(row.outcomes)
            if cells:
                groups[head] = {
                    name: tuple(Cell(outcomes=own[model]) if model in own else None for model in models)
                    for name, own in sorted(cells.items())
                }
        return Grid(title=title, models=models, groups=groups)

    @cached_property
    def cells(self) -> tuple[CellTable, ...]:
        """Every combination, one table for each kind of track, backend and device."""
        return tuple(table for track in TRACKS for table in self._cells(track))

    def _cells(self, track: str) -> Iterable[CellTable]:
        groups: dict[tuple[str, str], list[SubjectRow]] = {}
        for row in self.of_kind("cell", track=track):
            groups.setdefault((row.subject.names["backend"], row.subject.device), []).append(row)
        for (backend, device), rows in sorted(groups.items()):
            algorithms = tuple(sorted({row.subject.names["algorithm"] for row in rows}))
            known = {tuple(row.subject.names[kind] for kind in ("model", "engine", "algorithm")): row for row in rows}
            pairs = sorted({(model, engine) for model, engine, _ in known})
            yield CellTable(
                track=track,
                backend=backend,
                device=device,
                algorithms=algorithms,
                rows={pair: tuple(known.get((*pair, name)) for name in algorithms) for pair in pairs},
            )

    def capabilities(self, kind: SubjectKind) -> tuple[list[Cap], list[tuple[SubjectRow, list[Tally]]]]:
        """Capabilities that the claims about a kind prove, and for each subject the results of those claims."""
        rows = self.of_kind(kind)
        caps = sorted({cap for row in rows for one in row.outcomes for cap in self.claim(one).proves})
        return caps, [
            (row, [Tally.of(one for one in row.outcomes if cap in self.claim(one).proves) for cap in caps])
            for row in rows
        ]

    @cached_property
    def numbers(self) -> tuple[NumberRow, ...]:
        """Measurements, one row for each claim, in the order of the claims."""
        result: dict[str, list[tuple[Number, Outcome]]] = {}
        for outcome in self.report.outcomes:
            for one in outcome.numbers:
                result.setdefault(outcome.claim, []).append((one, outcome))
        rows: list[NumberRow] = []
        for claim, some in result.items():
            worst, where = max(some, key=lambda pair: _nearness(pair[0]))
            rows.append(NumberRow(claim=claim, worst=worst, where=where, num_numbers=len(some)))
        return tuple(rows)

    @property
    def nearest(self) -> tuple[NumberRow, ...]:
        """The same, of what has a bound and is not 0, nearest to its bound first."""
        rows = [row for row in self.numbers if row.worst.bound is not None and row.worst.value != 0]
        return tuple(sorted(rows, key=lambda row: _nearness(row.worst), reverse=True))

    def again(self, outcome: Outcome) -> str:
        """The command that tries this claim on this subject again."""
        claim, subject = self.claim(outcome), self.subject(outcome)
        words = ["unirl", "conformance", "--claim", claim.name]
        for kind, name in subject.names.items():
            words += [f"--{kind}", name]
        tier = max(claim.tier, "gpu" if subject.device == "cuda" else claim.tier, key=TIERS.index)
        if tier != "tiny":
            words += ["--tier", tier]
        return shlex.join(words)


def nearest_number(outcome: Outcome) -> Number | None:
    """The number of a claim that comes nearest to its bound, or None when it measured none."""
    return max(outcome.numbers, key=_nearness, default=None)


def subject_counts(outcomes: Iterable[Outcome]) -> Counter[tuple[SubjectKind, str]]:
    """(kind, id) of each subject -> how many of these outcomes are its own."""
    return Counter((one.kind, one.subject) for one in outcomes)


def _nearness(one: Number) -> tuple[float, float]:
    share = share_of_bound(one)
    return (share if share is not None else -1.0, math.inf if math.isnan(one.value) else abs(one.value))
