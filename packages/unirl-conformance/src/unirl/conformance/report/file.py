"""`conformance.json`: the states and numbers of a run, laid out to be searched and compared as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter
from unirl.core.errors import RecipeError

from ..claims import SUBJECT_KINDS, Claim, SubjectKind, all_claims
from ..environment import Environment
from ..results import Outcome, PartInfo, Report, SubjectInfo, Untried
from ..verdicts import Number

__all__ = ["SCHEMA", "load", "to_json"]

SCHEMA = 3
"""Version of the file's layout. It rises when a field changes its meaning or goes; readers refuse another one."""
NOT_RUN = "not run"
"""Key among the claims of a subject: reason -> claims that were not run for it."""
_HEAD = ("created", "tier", "selection", "seconds", "environment", "dists")
_LEVELS = {"environment": 2, "dists": 1, "claims": 2, "parts": 2, "results": 4, "untried": 1}
"""Section -> how many of its levels have a line for each entry."""
_PARTS: Mapping[SubjectKind, tuple[SubjectKind, ...]] = {
    "engine": ("engine", "model"),
    "cell": ("model", "engine", "algorithm", "backend"),
}
"""Kinds of the parts of a subject, in the order of its id; of other kinds it is one part."""


def to_json(report: Report) -> str:
    """The report as a file with one line for each outcome.

    `results`: device -> kind -> subject -> claim -> the state, or [state, numbers ..., reason, link, traceback] without
    empty texts; a number is [name, value], or [name, value, bound].  `claims`: kind -> claim -> tier.  `parts`: kind ->
    name -> its dist and its kinds of tracks.  `untried`: counts of claims that are n/a, or on an absent device.
    """
    data: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(report, name) for name in _HEAD}}
    data["environment"] = asdict(report.environment)
    data["claims"] = {
        kind: {one.name: one.tier for one in report.claims if one.kind == kind} for kind in _kinds(report.claims)
    }
    parts = sorted(
        {part for subject in report.subjects for part in subject.parts}, key=lambda one: (one.kind, one.name)
    )
    data["parts"] = {
        kind: {one.name: [one.dist, *one.tracks] for one in parts if one.kind == kind} for kind in _kinds(parts)
    }
    tried = dict.fromkeys(subject.device for subject in report.subjects)
    data["results"] = {device: _results(report.on(device)) for device in tried}
    data["untried"] = _counts(report.untried)
    sections = (f" {json.dumps(name)}: {_laid_out(data[name], _LEVELS.get(name, 0), ' ')}" for name in data)
    return "{\n" + ",\n".join(sections) + "\n}\n"


def load(path: Path) -> Report:
    """The report of a `conformance.json`, with the texts of those of its claims that are installed.

    Raises RecipeError for a file of another kind or schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path}: not a conformance.json that can be read: {error!r}.") from error
    if schema != SCHEMA:
        raise RecipeError(
            f"{path}: got schema {schema}, expected {SCHEMA}. Run conformance again, or use the release that wrote it."
        )
    try:
        return _report(data)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise RecipeError(f"{path}: does not follow schema {SCHEMA}: {error!r}.") from error


def _kinds(items: Iterable[Claim | PartInfo | SubjectInfo]) -> Iterator[SubjectKind]:
    there = {one.kind for one in items}
    return (kind for kind in SUBJECT_KINDS if kind in there)


def _results(report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    """kind -> subject -> claim -> entry."""
    by_subject: dict[tuple[str, str], list[Outcome]] = {(one.kind, one.id): [] for one in report.subjects}
    for one in report.outcomes:
        by_subject[one.kind, one.subject].append(one)
    return {
        kind: {
            one.id.partition("@")[0]: _entries(by_subject[kind, one.id]) for one in report.subjects if one.kind == kind
        }
        for kind in _kinds(report.subjects)
    }


def _entries(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    not_run: dict[str, list[str]] = {}
    for one in outcomes:
        if one.state == "not run":
            not_run.setdefault(one.reason, []).append(one.claim)
            continue
        numbers = [
            [number.name, *(_plain(each) for each in (number.value, number.bound) if each is not None)]
            for number in one.numbers
        ]
        texts = [one.reason, one.link, one.detail]
        while texts and not texts[-1]:
            texts.pop()
        result[one.claim] = [one.state, *numbers, *texts] if numbers or texts else one.state
    return {**result, NOT_RUN: not_run} if not_run else result


def _plain(value: float) -> float:
    """Four digits: another machine rounds otherwise anyway."""
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.4g}")


def _counts(untried: Iterable[Untried]) -> list[dict[str, object]]:
    """One entry for each state, device and kind, and for each reason of what was not run."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for one in untried:
        key = (one.state, one.device, one.kind, one.reason if one.state == "not run" else "")
        counts[key] = counts.get(key, 0) + one.num_claims
    names = ("state", "device", "kind", "reason")
    return [
        {**{name: value for name, value in zip(names, key, strict=True) if value}, "num_claims": count}
        for key, count in counts.items()
    ]


def _laid_out(value: Any, levels: int, indent: str) -> str:
    inner = f"{indent} "
    if levels and value and isinstance(value, dict):
        pairs = cast(dict[str, Any], value)
        lines = (f"{inner}{json.dumps(key)}: {_laid_out(each, levels - 1, inner)}" for key, each in pairs.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if levels and value and isinstance(value, list):
        items = cast(list[Any], value)
        return "[\n" + ",\n".join(inner + _laid_out(each, levels - 1, inner) for each in items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _report(data: Mapping[str, Any]) -> Report:
    known = {claim.name: claim for claim in all_claims(list(data["claims"]))}
    claims = [
        known.get(name, Claim(name=name, kind=kind, tier=tier))
        for kind, tiers in data["claims"].items()
        for name, tier in tiers.items()
    ]
    parts = {
        (kind, name): PartInfo(kind=kind, name=name, dist=dist, tracks=tuple(tracks))
        for kind, names in data["parts"].items()
        for name, (dist, *tracks) in names.items()
    }
    subjects: list[SubjectInfo] = []
    outcomes: list[Outcome] = []
    for device, kinds in data["results"].items():
        for kind, names in kinds.items():
            for name, entries in names.items():
                pairs = zip(_PARTS.get(kind, (kind,)), name.split("+"), strict=True)
                subject = SubjectInfo(kind=kind, device=device, parts=tuple(parts[pair] for pair in pairs))
                subjects.append(subject)
                outcomes += _outcomes(subject, entries)
    order = {claim.name: place for place, claim in enumerate(claims)}
    return Report(
        **{name: data[name] for name in _HEAD if name not in ("environment", "selection")},
        selection=tuple(data["selection"]),
        environment=TypeAdapter(Environment).validate_python(data["environment"]),
        claims=tuple(claims),
        subjects=tuple(subjects),
        outcomes=tuple(sorted(outcomes, key=lambda one: (order[one.claim], one.subject))),
        untried=tuple(Untried(**entry) for entry in data["untried"]),
    )


def _outcomes(subject: SubjectInfo, entries: Mapping[str, Any]) -> Iterator[Outcome]:
    for claim, entry in entries.items():
        if claim == NOT_RUN:
            for reason, names in entry.items():
                for name in names:
                    yield Outcome(claim=name, subject=subject.id, kind=subject.kind, state="not run", reason=reason)
            continue
        state, *others = [entry] if isinstance(entry, str) else entry
        if state not in ("pass", "fail", "gap"):
            raise ValueError(f"{claim} on {subject.id}: got state {state!r}")
        texts = [each for each in others if isinstance(each, str)]
        reason, link, detail = [*texts, "", "", ""][:3]
        yield Outcome(
            claim=claim,
            subject=subject.id,
            kind=subject.kind,
            state=state,
            reason=reason,
            link=link,
            detail=detail,
            numbers=tuple(_number(*each) for each in others if not isinstance(each, str)),
        )


def _number(name: str, value: float, bound: float | None = None) -> Number:
    return Number(name=name, value=float(value), bound=None if bound is None else float(bound))
