"""A report seen as tables: outcomes by subject, the matrix of cells, capabilities, numbers, reasons.

All shown data is computed here once; the terminal, MATRIX.md and the page only format it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..claims import SUBJECT_KINDS, TIERS, SubjectKind
from ..results import ClaimInfo, Outcome, Report, SubjectInfo
from ..verdicts import STATES, Number, State
from .words import SEVERITY, count_of, share_of_bound

__all__ = [
    "TRACKS",
    "CapabilityTable",
    "Cell",
    "CellRow",
    "CellTable",
    "NumberRow",
    "PairTable",
    "Reason",
    "SubjectRow",
    "Tally",
    "View",
    "log_prob_mismatch",
    "nearest_number",
]

LOG_PROB_GAP = "log-prob gap"
"""How the number begins that says how far rollout and replay are apart."""

TRACKS: Mapping[str, str] = {"latent": "Diffusion models", "text": "Token models"}
"""Kinds of tracks and what models of each are called."""


@dataclass(frozen=True)
class Tally:
    """How many outcomes ended in each state."""

    counts: tuple[int, ...]
    """In the order of `STATES`."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        states = [outcome.state for outcome in outcomes]
        return cls(tuple(states.count(state) for state in STATES))

    def __getitem__(self, state: State) -> int:
        return self.counts[STATES.index(state)]

    @property
    def state(self) -> State:
        """Of all together: the gravest that is there, so that only what wholly ran and holds is a pass."""
        for state in SEVERITY:
            if self[state]:
                return state
        return "n/a"

    @property
    def tried(self) -> int:
        """All that are not n/a."""
        return sum(self.counts) - self["n/a"]

    def __str__(self) -> str:
        """`pass`, `not run`, `1 of 12 fail`: the state, and of how many where some ended otherwise."""
        state = self.state
        return state if self[state] == self.tried or state == "n/a" else f"{self[state]} of {self.tried} {state}"


@dataclass(frozen=True, kw_only=True)
class SubjectRow:
    """A subject with its outcomes, in the order of the claims."""

    subject: SubjectInfo
    outcomes: tuple[Outcome, ...]
    tally: Tally

    @property
    def is_tried(self) -> bool:
        """Whether any of its claims ran."""
        return self.tally["not run"] < self.tally.tried


@dataclass(frozen=True, kw_only=True)
class Cell:
    row: SubjectRow
    gap: Number | None
    """The log-prob gap that comes nearest to its bound."""


@dataclass(frozen=True, kw_only=True)
class CellRow:
    model: str
    engine: str
    cells: tuple[Cell | None, ...]
    """One for each algorithm of the table; None where there is none."""

    @property
    def bound(self) -> float | None:
        """That of the log-prob gaps, where it is the same in all cells of the row."""
        return _common_bound([cell.gap for cell in self.cells if cell and cell.gap])


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """Engines against models of one kind of track, on one device."""

    device: str
    models: tuple[str, ...]
    rows: tuple[tuple[str, tuple[SubjectRow | None, ...]], ...]
    """Name of the engine, and for each model their pair; None where nothing applies to it."""

    @property
    def is_tried(self) -> bool:
        """Whether something ran: a table of what did not run says no more than its reason."""
        return any(row is not None and row.is_tried for _, rows in self.rows for row in rows)


@dataclass(frozen=True, kw_only=True)
class CellTable:
    """Models of one kind of track and engines against algorithms, on one backend and device. What is n/a throughout is
    left out."""

    track: str
    backend: str
    device: str
    algorithms: tuple[str, ...]
    rows: tuple[CellRow, ...]

    @property
    def is_tried(self) -> bool:
        return any(cell is not None and cell.row.is_tried for row in self.rows for cell in row.cells)

    @property
    def gaps(self) -> list[Number]:
        """The log-prob gaps of all cells that have one."""
        return [cell.gap for row in self.rows for cell in row.cells if cell and cell.gap]

    @property
    def bound(self) -> float | None:
        """That of the log-prob gaps, where it is the same in all cells."""
        return _common_bound(self.gaps)


@dataclass(frozen=True, kw_only=True)
class CapabilityTable:
    """Subjects of a kind against the capabilities that the claims about them prove."""

    capabilities: tuple[str, ...]
    rows: tuple[tuple[SubjectRow, tuple[Tally, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class NumberRow:
    """The numbers of a claim over all subjects that they were measured on."""

    claim: str
    worst: Number
    """The one nearest to its bound; without bounds the largest."""
    where: Outcome
    """Where that was."""
    num_numbers: int


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Outcomes that say the same."""

    text: str
    link: str
    outcomes: tuple[Outcome, ...]

    @property
    def subjects(self) -> dict[tuple[SubjectKind, str], int]:
        """Kind and id of each subject -> how many claims about it."""
        result: dict[tuple[SubjectKind, str], int] = {}
        for outcome in self.outcomes:
            key = (outcome.kind, outcome.subject)
            result[key] = result.get(key, 0) + 1
        return result


class View:
    """What there is to show of a report. Every list is in an order that the report alone decides."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.claims = {claim.name: claim for claim in report.claims}
        self._subjects = {(subject.kind, subject.id): subject for subject in report.subjects}

    def claim(self, outcome: Outcome) -> ClaimInfo:
        return self.claims[outcome.claim]

    def subject(self, outcome: Outcome) -> SubjectInfo:
        return self._subjects[outcome.kind, outcome.subject]

    @cached_property
    def rows(self) -> tuple[SubjectRow, ...]:
        """Every subject that a claim was tried on, in the order of the report."""
        result: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.report.outcomes:
            result.setdefault((outcome.kind, outcome.subject), []).append(outcome)
        return tuple(
            SubjectRow(subject=subject, outcomes=tuple(result[key]), tally=Tally.of(result[key]))
            for key, subject in self._subjects.items()
            if key in result
        )

    def of_kind(self, kind: SubjectKind, *, track: str = "") -> tuple[SubjectRow, ...]:
        """Subjects that a claim of this kind applies to; with `track`, those that are tried on it."""
        return tuple(
            row
            for row in self.rows
            if row.subject.kind == kind and row.tally.tried and (not track or track in row.subject.tracks)
        )

    @property
    def not_applicable(self) -> str:
        """`12 claims and all claims about 184 of kind cell`: what is n/a, counted; or nothing."""
        apart = [row.subject.kind for row in self.rows if not row.tally.tried]
        claims = sum(row.tally["n/a"] for row in self.rows if row.tally.tried)
        reply = [count_of(claims, "claim")] if claims else []
        reply += [f"all claims about {apart.count(kind)} of kind {kind}" for kind in self.kinds if kind in apart]
        return " and ".join(reply)

    @property
    def kinds(self) -> tuple[SubjectKind, ...]:
        """Kinds of subjects that something was tried on."""
        there = {row.subject.kind for row in self.rows}
        return tuple(kind for kind in SUBJECT_KINDS if kind in there)

    @property
    def dists(self) -> tuple[str, ...]:
        """Dists that a claim was tried on."""
        return tuple(sorted({dist for row in self.rows for dist in row.subject.dists}))

    @property
    def untried(self) -> str:
        """`3 model, 12 cell`: subjects that no claim was tried on, in this tier or by this selection; or nothing."""
        tried = {(row.subject.kind, row.subject.id) for row in self.rows}
        left = [kind for kind, name in self._subjects if (kind, name) not in tried]
        return ", ".join(f"{left.count(kind)} {kind}" for kind in SUBJECT_KINDS if kind in left)

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        tally = Tally.of(self.report.outcomes)
        if tally["fail"]:
            return f"{count_of(tally['fail'], 'claim fails', 'claims fail')}."
        if not tally["pass"] and not tally["gap"]:
            return "Nothing could be tried here." if tally["not run"] else "No claim applies to what was tried."
        rest = [f"{tally['not run']} not run"] if tally["not run"] else []
        rest += [count_of(tally["gap"], "declared gap")] if tally["gap"] else []
        return f"Nothing fails{': ' if rest else '.'}{' and '.join(rest)}{'.' if rest else ''}"

    def with_state(self, state: State) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.report.outcomes if outcome.state == state)

    def reasons(self, state: State) -> tuple[Reason, ...]:
        """Outcomes of a state by what they say, most frequent first."""
        result: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.with_state(state):
            result.setdefault((outcome.reason, outcome.link), []).append(outcome)
        reasons = [Reason(text=text, link=link, outcomes=tuple(some)) for (text, link), some in result.items()]
        return tuple(sorted(reasons, key=lambda reason: (-len(reason.outcomes), reason.text, reason.link)))

    @property
    def pairs(self) -> tuple[tuple[str, PairTable], ...]:
        """Engines against models: track and table, one for each kind of track and device."""
        tables: list[tuple[str, PairTable]] = []
        for track in TRACKS:
            rows = self.of_kind("engine", track=track)
            for device in sorted({row.subject.device for row in rows}):
                result = {
                    (row.subject.parts["engine"], row.subject.parts["model"]): row
                    for row in rows
                    if row.subject.device == device
                }
                models = tuple(sorted({model for _, model in result}))
                engines = sorted({engine for engine, _ in result})
                lines = tuple((engine, tuple(result.get((engine, model)) for model in models)) for engine in engines)
                tables.append((track, PairTable(device=device, models=models, rows=lines)))
        return tuple(tables)

    @cached_property
    def cells(self) -> tuple[CellTable, ...]:
        """The matrix, one table for each kind of track, backend and device."""
        return tuple(table for track in TRACKS for table in self._cells(track))

    def _cells(self, track: str) -> Iterable[CellTable]:
        rows = self.of_kind("cell", track=track)
        tables: list[CellTable] = []
        for backend, device in dict.fromkeys((r.subject.parts["backend"], r.subject.device) for r in rows):
            chosen = [r for r in rows if (r.subject.parts["backend"], r.subject.device) == (backend, device)]
            algorithms = tuple(sorted({r.subject.parts["algorithm"] for r in chosen}))
            parts = {
                (r.subject.parts["model"], r.subject.parts["engine"], r.subject.parts["algorithm"]): r for r in chosen
            }
            pairs = sorted({(model, engine) for model, engine, _ in parts})
            tables.append(
                CellTable(
                    track=track,
                    backend=backend,
                    device=device,
                    algorithms=algorithms,
                    rows=tuple(
                        CellRow(
                            model=model,
                            engine=engine,
                            cells=tuple(_cell(parts.get((model, engine, name))) for name in algorithms),
                        )
                        for model, engine in pairs
                    ),
                )
            )
        return sorted(tables, key=lambda table: (table.backend, table.device))

    def capabilities(self, kind: SubjectKind, *, track: str = "") -> CapabilityTable:
        """How the claims ended that prove each capability of the subjects of a kind; without those that are n/a to all
        of them."""
        rows = self.of_kind(kind, track=track)
        caps = tuple(
            sorted(
                {cap for row in rows for one in row.outcomes if one.state != "n/a" for cap in self.claim(one).proves}
            )
        )
        return CapabilityTable(
            capabilities=caps,
            rows=tuple(
                (row, tuple(Tally.of(o for o in row.outcomes if cap in self.claim(o).proves) for cap in caps))
                for row in rows
            ),
        )

    @cached_property
    def numbers(self) -> tuple[NumberRow, ...]:
        """What was measured, one row for each claim, in the order of the claims."""
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
        for kind, name in subject.parts.items():
            words += [f"--{kind}", name]
        if subject.kind == "plugin":
            words += ["--plugin", *subject.dists]
        tier = max(claim.tier, "gpu" if subject.device == "cuda" else claim.tier, key=TIERS.index)
        if tier != "tiny":
            words += ["--tier", tier]
        return shlex.join(words)


def nearest_number(outcome: Outcome) -> Number | None:
    """The number of a claim that comes nearest to its bound, or None when it measured none."""
    return max(outcome.numbers, key=_nearness, default=None)


def log_prob_mismatch(outcomes: Sequence[Outcome]) -> Number | None:
    """The log-prob gap that comes nearest to its bound, or None when none was measured."""
    result = [one for outcome in outcomes for one in outcome.numbers if one.name.startswith(LOG_PROB_GAP)]
    return max(result, key=_nearness, default=None)


def _common_bound(gaps: Sequence[Number]) -> float | None:
    bounds = {gap.bound for gap in gaps}
    return bounds.pop() if len(bounds) == 1 else None


def _nearness(one: Number) -> tuple[float, float]:
    share = share_of_bound(one)
    size = math.inf if math.isnan(one.value) else abs(one.value)
    return (share if share is not None else -1.0, size)


def _cell(row: SubjectRow | None) -> Cell | None:
    return None if row is None else Cell(row=row, gap=log_prob_mismatch(row.outcomes))
