"""A report seen as tables: outcomes by subject, the matrix of cells, capabilities, numbers, reasons.

Everything that is shown is worked out here once; the terminal, MATRIX.md and the page only set it out.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..claims import SUBJECT_KINDS, TIERS, SubjectKind
from ..results import ClaimInfo, Outcome, Report, SubjectInfo
from ..verdicts import STATES, Number, State
from .words import SEVERITY, count_of, share_of_bound

__all__ = [
    "CapabilityTable",
    "Cell",
    "CellRow",
    "CellTable",
    "NumberRow",
    "Reason",
    "SubjectRow",
    "Tally",
    "View",
    "log_prob_gap",
    "nearest_number",
]

LOG_PROB_GAP = "log-prob gap"
"""How the number begins that says how far rollout and replay are apart."""

_NAMED = re.compile(r"'([^']*)'( \([^)]*\))?")
"""A name in a reason: `'flow-grpo'`, or a plugin with its dist and version in brackets."""


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
    def only_reason(self) -> str:
        """The sentence where every claim is n/a for the same reason: parts that do not go together."""
        reasons = {outcome.reason for outcome in self.outcomes if outcome.state == "n/a"}
        return reasons.pop() if self.tally["n/a"] == len(self.outcomes) and len(reasons) == 1 else ""


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


@dataclass(frozen=True, kw_only=True)
class CellTable:
    """Models and engines against algorithms, on one backend and device."""

    backend: str
    device: str
    algorithms: tuple[str, ...]
    rows: tuple[CellRow, ...]

    @property
    def gaps(self) -> list[Number]:
        """The log-prob gaps of all cells that have one."""
        return [cell.gap for row in self.rows for cell in row.cells if cell and cell.gap]

    @property
    def bound(self) -> float | None:
        """That of the log-prob gaps, where it is the same in all cells."""
        bounds = {gap.bound for gap in self.gaps}
        return bounds.pop() if len(bounds) == 1 else None


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
        found: dict[tuple[SubjectKind, str], int] = {}
        for outcome in self.outcomes:
            key = (outcome.kind, outcome.subject)
            found[key] = found.get(key, 0) + 1
        return found


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
        found: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.report.outcomes:
            found.setdefault((outcome.kind, outcome.subject), []).append(outcome)
        return tuple(
            SubjectRow(subject=subject, outcomes=tuple(found[key]), tally=Tally.of(found[key]))
            for key, subject in self._subjects.items()
            if key in found
        )

    def of_kind(self, kind: SubjectKind) -> tuple[SubjectRow, ...]:
        return tuple(row for row in self.rows if row.subject.kind == kind)

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
        """Outcomes of a state by what they say, most frequent first; what is n/a also whichever part it names."""
        found: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.with_state(state):
            text = self._without_names(outcome.reason) if state == "n/a" else outcome.reason
            found.setdefault((text, outcome.link), []).append(outcome)
        reasons = [Reason(text=text, link=link, outcomes=tuple(some)) for (text, link), some in found.items()]
        return tuple(sorted(reasons, key=lambda reason: (-len(reason.outcomes), reason.text, reason.link)))

    def _without_names(self, reason: str) -> str:
        names = {name for subject in self.report.subjects for name in subject.parts.values()}
        return _NAMED.sub(lambda found: "…" if found[2] or found[1] in names else found[0], reason)

    @cached_property
    def cells(self) -> tuple[CellTable, ...]:
        """The matrix, one table for each backend and device."""
        rows = self.of_kind("cell")
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
        return tuple(sorted(tables, key=lambda table: (table.backend, table.device)))

    def capabilities(self, kind: SubjectKind) -> CapabilityTable:
        """How the claims ended that prove each capability of the subjects of a kind."""
        caps = tuple(sorted({cap for claim in self.report.claims if claim.kind == kind for cap in claim.proves}))
        return CapabilityTable(
            capabilities=caps,
            rows=tuple(
                (row, tuple(Tally.of(o for o in row.outcomes if cap in self.claim(o).proves) for cap in caps))
                for row in self.of_kind(kind)
            ),
        )

    @cached_property
    def numbers(self) -> tuple[NumberRow, ...]:
        """What was measured, one row for each claim, in the order of the claims."""
        found: dict[str, list[tuple[Number, Outcome]]] = {}
        for outcome in self.report.outcomes:
            for one in outcome.numbers:
                found.setdefault(outcome.claim, []).append((one, outcome))
        rows: list[NumberRow] = []
        for claim, some in found.items():
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


def log_prob_gap(outcomes: Sequence[Outcome]) -> Number | None:
    """The log-prob gap that comes nearest to its bound, or None when none was measured."""
    found = [one for outcome in outcomes for one in outcome.numbers if one.name.startswith(LOG_PROB_GAP)]
    return max(found, key=_nearness, default=None)


def _nearness(one: Number) -> tuple[float, float]:
    share = share_of_bound(one)
    size = math.inf if math.isnan(one.value) else abs(one.value)
    return (share if share is not None else -1.0, size)


def _cell(row: SubjectRow | None) -> Cell | None:
    return None if row is None else Cell(row=row, gap=log_prob_gap(row.outcomes))
