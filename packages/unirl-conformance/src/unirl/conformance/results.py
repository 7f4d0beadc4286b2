"""What a run of conformance found, as data: the schema of `conformance.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import TypeAdapter, ValidationError
from unirl.core.catalog import Catalog
from unirl.core.errors import RecipeError
from unirl.core.spec import EngineSpec

from .claims import Claim, SubjectKind, Tier, all_claims, claim_kinds
from .environment import Environment, describe_environment, suite_hash
from .subjects import Subject
from .verdicts import STATES, Number, State

__all__ = ["SCHEMA", "ClaimInfo", "Collector", "Outcome", "Report", "SubjectInfo", "load", "to_json"]

SCHEMA = 1
"""Version of the file's layout. It rises when a field changes its meaning or goes; readers refuse another one."""


@dataclass(frozen=True, kw_only=True)
class ClaimInfo:
    """A claim as the report explains it."""

    name: str
    kind: SubjectKind
    proves: tuple[str, ...]
    """Names of the capabilities."""
    tier: Tier
    meaning: str
    if_it_fails: str


@dataclass(frozen=True, kw_only=True)
class SubjectInfo:
    """A subject with the dists that its parts come from."""

    id: str
    kind: SubjectKind
    device: str
    parts: Mapping[str, str]
    """Kind -> name of each part; empty for a plugin."""
    dists: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one claim ended for one subject."""

    claim: str
    subject: str
    """Id of the subject, unique within its kind, which is that of the claim."""
    kind: SubjectKind
    state: State
    reason: str = ""
    """One sentence for every state but pass."""
    link: str = ""
    """Where a gap is followed up."""
    numbers: tuple[Number, ...] = ()
    seconds: float = 0.0
    detail: str = ""
    """The traceback of a failure."""

    @property
    def key(self) -> tuple[str, str]:
        """What identifies it across runs."""
        return (self.claim, self.subject)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run."""

    created: str
    """ISO 8601, UTC."""
    tier: Tier
    environment: Environment
    suite: str
    """Hash of the suite's sources: reports of one hash made the same claims."""
    dists: Mapping[str, str]
    """Every installed unirl dist and its version."""
    seconds: float
    claims: tuple[ClaimInfo, ...]
    """The claims that were tried, by kind and name."""
    subjects: tuple[SubjectInfo, ...]
    outcomes: tuple[Outcome, ...]

    def count(self, state: State) -> int:
        return sum(outcome.state == state for outcome in self.outcomes)

    @property
    def counts(self) -> dict[State, int]:
        return {state: self.count(state) for state in STATES}

    @property
    def exit_code(self) -> int:
        """0 all is well, 1 a claim failed, 3 nothing ran at all because something is absent."""
        if self.count("fail"):
            return 1
        ran = self.count("pass") + self.count("gap")
        return 3 if not ran and self.count("not run") else 0


def to_json(report: Report) -> str:
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(report)}, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> Report:
    """The report of a `conformance.json`. Raises RecipeError when it is none, or of another schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data.pop("schema")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RecipeError(f"{path}: this is no conformance.json that can be read: {error!r}.") from error
    if found != SCHEMA:
        raise RecipeError(
            f"{path}: it has schema {found}, this release reads {SCHEMA}. Run conformance again, or use the release "
            "that wrote it."
        )
    try:
        return TypeAdapter(Report).validate_python(data)
    except ValidationError as error:
        raise RecipeError(f"{path}: it is not what schema {SCHEMA} says: {error}") from error


class Collector:
    """A pytest plugin of the controlling process: gathers the outcomes, whichever worker ran the claims."""

    def __init__(self, *, catalog: Catalog, tier: Tier, subjects: Sequence[Subject], property_name: str) -> None:
        self._catalog = catalog
        self._tier: Tier = tier
        self._subjects = list(subjects)
        self._property = property_name
        self._found: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        for name, value in report.user_properties:
            if name != self._property:
                continue
            found = json.loads(cast(str, value))
            known = self._found.setdefault(report.nodeid, found)
            # A later phase has more to say; only a failure is final.
            if known is not found and known.get("state") != "fail":
                known.update(found)
        if report.failed and report.nodeid not in self._found:
            # Its process died before the claim began, so nothing but its address is known.
            claim, _, subject = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
            name = claim.removeprefix("test_").replace("_", "-")
            self._found[report.nodeid] = {"claim": name, "subject": subject, "kind": claim_kinds()[name]}

    def report(self, *, created: str, seconds: float) -> Report:
        """Everything so far."""
        outcomes = [
            Outcome(
                claim=found["claim"],
                subject=found["subject"],
                kind=found["kind"],
                # A claim whose worker died has no state of its own.
                state=found.get("state", "fail"),
                reason=found.get("reason", "the process that tried it ended without a result"),
                link=found.get("link", ""),
                numbers=tuple(Number(**number) for number in found.get("numbers", ())),
                seconds=round(self._seconds[nodeid], 4),
                detail=found.get("detail", ""),
            )
            for nodeid, found in self._found.items()
        ]
        claims = {claim.name: claim for claim in all_claims({found["kind"] for found in self._found.values()})}
        order = {name: place for place, name in enumerate(claims)}
        tried = {outcome.claim for outcome in outcomes}
        return Report(
            created=created,
            tier=self._tier,
            environment=describe_environment(self._catalog, self._engines()),
            suite=suite_hash(),
            dists={record.dist: record.version for record in self._catalog.records},
            seconds=round(seconds, 2),
            claims=tuple(_claim_info(claim) for claim in claims.values() if claim.name in tried),
            subjects=tuple(_subject_info(subject) for subject in self._subjects),
            outcomes=tuple(sorted(outcomes, key=lambda outcome: (order[outcome.claim], outcome.subject))),
        )

    def _engines(self) -> list[EngineSpec]:
        """Of the subjects, each once."""
        specs = (found.spec for subject in self._subjects for found in subject.parts)
        return list({spec.name: spec for spec in specs if isinstance(spec, EngineSpec)}.values())


def _claim_info(claim: Claim) -> ClaimInfo:
    return ClaimInfo(
        name=claim.name,
        kind=claim.kind,
        proves=tuple(cap.value for cap in claim.proves),
        tier=claim.tier,
        meaning=claim.meaning,
        if_it_fails=claim.if_it_fails,
    )


def _subject_info(subject: Subject) -> SubjectInfo:
    return SubjectInfo(
        id=subject.id,
        kind=subject.kind,
        device=subject.device,
        parts={found.spec.kind: found.spec.name for found in subject.parts},
        dists=subject.dists,
    )
