"""What a run of conformance found, as data: the schema of `conformance.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import EngineSpec

from .claims import Claim, SubjectKind, Tier, all_claims, claim_kinds
from .environment import Environment, describe_environment, suite_hash
from .subjects import Subject, not_applicable
from .verdicts import STATES, Number, State

__all__ = [
    "SCHEMA",
    "ClaimInfo",
    "Collector",
    "Outcome",
    "Report",
    "SubjectInfo",
    "claim_info",
    "load",
    "subject_info",
    "to_json",
]

SCHEMA = 2
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
    tracks: tuple[str, ...] = ()
    """Kinds of tracks that it is tried on; none where it has to do with neither."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one claim ended for one subject."""

    claim: str
    subject: str
    """Id of the subject, unique within its kind, which is that of the claim."""
    kind: SubjectKind
    state: State
    reason: str = ""
    """One sentence for every state but pass. A report that was read back has none for n/a."""
    link: str = ""
    """Where a gap is followed up."""
    numbers: tuple[Number, ...] = ()
    seconds: float = 0.0
    detail: str = ""
    """The traceback of a failure."""


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
    """The report as a file that a person can compare line by line with an earlier one.

    One line for each claim, subject and outcome; one for all claims about a subject that were not run for one reason.
    What is n/a is counted with its subject: it is every claim about its kind that has no outcome. Times below a second
    are left out.
    """
    head = {"schema": SCHEMA, **{name: getattr(report, name) for name in _HEAD}}
    head["environment"] = dataclasses.asdict(report.environment)
    lists: dict[str, Iterable[Mapping[str, object]]] = {
        "claims": (dataclasses.asdict(claim) for claim in report.claims),
        "subjects": _subject_lines(report),
        "outcomes": _outcome_lines(report.outcomes),
    }
    blocks = [f" {json.dumps(name)}: {_indented(value)}" for name, value in head.items()]
    for name, items in lists.items():
        lines = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)
        blocks.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


_HEAD = ("created", "tier", "environment", "suite", "dists", "seconds")


def _indented(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n ")


def _subject_lines(report: Report) -> Iterator[Mapping[str, object]]:
    about: dict[SubjectKind, list[str]] = {}
    for claim in report.claims:
        about.setdefault(claim.kind, []).append(claim.name)
    states = {(one.kind, one.subject, one.claim): one.state for one in report.outcomes}
    for subject in report.subjects:
        known = [(name, states.get((subject.kind, subject.id, name))) for name in about.get(subject.kind, ())]
        line = {**dataclasses.asdict(subject), "n/a": [state for _, state in known].count("n/a")}
        not_tried = [name for name, state in known if state is None]
        yield {**line, "not_tried": not_tried} if not_tried else line


def _outcome_lines(outcomes: Iterable[Outcome]) -> Iterator[Mapping[str, object]]:
    not_run: dict[tuple[str, str, str], list[str]] = {}
    for one in outcomes:
        if one.state == "not run":
            not_run.setdefault((one.kind, one.subject, one.reason), []).append(one.claim)
        elif one.state != "n/a":
            line = dataclasses.asdict(one)
            line["seconds"] = round(one.seconds)
            yield {name: value for name, value in line.items() if value or name == "state"}
    for (kind, subject, reason), claims in not_run.items():
        yield {"kind": kind, "subject": subject, "state": "not run", "reason": reason, "claims": claims}


def load(path: Path) -> Report:
    """The report of a `conformance.json`; why claims are n/a is not in it. Raises RecipeError when it is none, or of
    another schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        result = data.pop("schema")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RecipeError(f"{path}: this is no conformance.json that can be read: {error!r}.") from error
    if result != SCHEMA:
        raise RecipeError(
            f"{path}: it has schema {result}, this release reads {SCHEMA}. Run conformance again, or use the release "
            "that wrote it."
        )
    try:
        return _report(TypeAdapter(_File).validate_python(data), path)
    except ValidationError as error:
        raise RecipeError(f"{path}: it is not what schema {SCHEMA} says: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _SubjectLine(SubjectInfo):
    num_not_applicable: Annotated[int, Field(alias="n/a")]
    not_tried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _OutcomeLine:
    kind: SubjectKind
    subject: str
    state: State
    claim: str = ""
    claims: tuple[str, ...] = ()
    """In place of `claim`, where several share the line."""
    reason: str = ""
    link: str = ""
    numbers: tuple[Number, ...] = ()
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class _File:
    created: str
    tier: Tier
    environment: Environment
    suite: str
    dists: Mapping[str, str]
    seconds: float
    claims: tuple[ClaimInfo, ...]
    subjects: tuple[_SubjectLine, ...]
    outcomes: tuple[_OutcomeLine, ...]


def _report(file: _File, path: Path) -> Report:
    outcomes = [
        Outcome(claim=name, **{key: value for key, value in vars(line).items() if key not in ("claim", "claims")})
        for line in file.outcomes
        for name in (line.claims or (line.claim,))
    ]
    tried = {(one.kind, one.subject, one.claim) for one in outcomes}
    for subject in file.subjects:
        others = [
            Outcome(claim=claim.name, subject=subject.id, kind=subject.kind, state="n/a")
            for claim in file.claims
            if claim.kind == subject.kind
            and (subject.kind, subject.id, claim.name) not in tried
            and claim.name not in subject.not_tried
        ]
        if len(others) != subject.num_not_applicable:
            raise RecipeError(
                f"{path}: {len(others)} claims about {subject.kind} {subject.id!r} have no outcome, and "
                f"{subject.num_not_applicable} are counted as n/a; lines were added or taken out by hand."
            )
        outcomes += others
    order = {claim.name: place for place, claim in enumerate(file.claims)}
    return Report(
        **{name: getattr(file, name) for name in _HEAD},
        claims=file.claims,
        subjects=tuple(
            SubjectInfo(**{item.name: getattr(line, item.name) for item in dataclasses.fields(SubjectInfo)})
            for line in file.subjects
        ),
        outcomes=tuple(sorted(outcomes, key=lambda one: (order[one.claim], one.subject))),
    )


_NO_RESULT = "the process that tried it ended without a result"


class Collector:
    """A pytest plugin of the controlling process: gathers the outcomes, whichever worker ran the claims."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        tier: Tier,
        subjects: Sequence[Subject],
        covers: Callable[[Claim], bool],
        property_name: str,
    ) -> None:
        """covers: whether a claim is selected."""
        self._catalog = catalog
        self._covers = covers
        self._tier: Tier = tier
        self._subjects = list(subjects)
        self._property = property_name
        self._found: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self._collected: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        for name, value in report.user_properties:
            if name != self._property:
                continue
            result = json.loads(cast(str, value))
            known = self._found.setdefault(report.nodeid, result)
            # A later phase has more to say; only a failure is final.
            if known is not result and known.get("state") != "fail":
                known.update(result)
        if report.failed:
            # When a worker dies, its report has no state, and nothing at all if the claim had not begun.
            died = {"state": "fail", "reason": _NO_RESULT}
            self._found[report.nodeid] = {**died, **self._found.get(report.nodeid, _named(report.nodeid))}

    def report(self, *, created: str, seconds: float, is_stopped: bool = False) -> Report:
        """Everything so far. is_stopped: claims without a result are not run; otherwise they have failed."""
        ended = {nodeid: result for nodeid, result in self._found.items() if "state" in result or not is_stopped}
        outcomes = [
            Outcome(**_named(nodeid), state="not run", reason="the run was stopped before it was tried")
            for nodeid in (self._collected - ended.keys() if is_stopped else ())
        ]
        outcomes += [
            Outcome(
                claim=result["claim"],
                subject=result["subject"],
                kind=result["kind"],
                state=result.get("state", "fail"),
                reason=result.get("reason", _NO_RESULT),
                link=result.get("link", ""),
                numbers=tuple(Number(**number) for number in result.get("numbers", ())),
                seconds=round(self._seconds[nodeid], 4),
                detail=result.get("detail", ""),
            )
            for nodeid, result in ended.items()
        ]
        # All that is static is about plugins; the modules of other claims import torch.
        kinds: set[SubjectKind] = {"plugin"} if self._tier == "static" else {one.kind for one in self._subjects}
        tried = {outcome.claim for outcome in outcomes}
        claims: dict[str, Claim] = {}
        for claim in filter(self._covers, all_claims(kinds)):
            reasons = [(one, not_applicable(claim, one)) for one in self._subjects if one.kind == claim.kind]
            # pytest may have been told to leave out claims that apply to something.
            if claim.name in tried or (reasons and all(reason for _, reason in reasons)):
                claims[claim.name] = claim
                outcomes += [
                    Outcome(claim=claim.name, subject=subject.id, kind=subject.kind, state="n/a", reason=reason)
                    for subject, reason in reasons
                    if reason
                ]
        order = {name: place for place, name in enumerate(claims)}
        return Report(
            created=created,
            tier=self._tier,
            environment=describe_environment(self._catalog, self._engines()),
            suite=suite_hash(),
            dists={record.dist: record.version for record in self._catalog.records},
            seconds=round(seconds, 2),
            claims=tuple(claim_info(claim) for claim in claims.values()),
            subjects=tuple(subject_info(subject) for subject in self._subjects),
            outcomes=tuple(sorted(outcomes, key=lambda outcome: (order[outcome.claim], outcome.subject))),
        )

    def _engines(self) -> list[EngineSpec]:
        """Of the subjects, each once."""
        specs = (result.spec for subject in self._subjects for result in subject.parts)
        return list({spec.name: spec for spec in specs if isinstance(spec, EngineSpec)}.values())


def _named(nodeid: str) -> dict[str, Any]:
    """Claim, subject and its kind, from a pytest node id."""
    claim, _, subject = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    name = claim.removeprefix("test_").replace("_", "-")
    return {"claim": name, "subject": subject, "kind": claim_kinds()[name]}


def claim_info(claim: Claim) -> ClaimInfo:
    """A claim as a report explains it."""
    return ClaimInfo(
        name=claim.name,
        kind=claim.kind,
        proves=tuple(cap.value for cap in claim.proves),
        tier=claim.tier,
        meaning=claim.meaning,
        if_it_fails=claim.if_it_fails,
    )


def subject_info(subject: Subject) -> SubjectInfo:
    """A subject as a report names it."""
    return SubjectInfo(
        id=subject.id,
        kind=subject.kind,
        device=subject.device,
        parts={result.spec.kind: result.spec.name for result in subject.parts},
        dists=subject.dists,
        tracks=subject.tracks,
    )
