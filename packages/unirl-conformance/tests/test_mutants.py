"""Every claim fails on a part that is broken in the way it is about, and no other claim does."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind, all_claims
from unirl.conformance.results import Report
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection, subjects
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import Spec

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants.mutant import KINDS, Mutant, catalogs_of, mutants_of
from conformance_mutants.own_claims import SLOW

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

REPORTS: dict[tuple[str, SubjectKind], Report] = {}


def params(*, without: Collection[str] = ()) -> list[Any]:
    return [
        pytest.param(kind, mutant, id=f"{kind}-{mutant.name}")
        for kind in KINDS
        for mutant in mutants_of(kind)
        if mutant.claim not in without
    ]


@pytest.fixture(scope="module", autouse=True)
def forget_reports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    REPORTS.clear()
    # Mutants that are whole dists put themselves on the path, and other tests plant modules of the same names.
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("planted_"):
            del sys.modules[name]


def report_on_all_claims(kind: SubjectKind) -> Report:
    """All mutants of a kind, and the healthy parts that are not installed, on every claim."""
    if ("all", kind) not in REPORTS:
        without = {catalog: left_out(kind, catalog) for catalog in catalogs_of(kind)}
        REPORTS["all", kind] = joined(
            [run_suite(Selection(kinds=(kind,), without=names), catalog=catalog) for catalog, names in without.items()]
        )
    return REPORTS["all", kind]


def report_on_own_claims(kind: SubjectKind) -> Report:
    """Each mutant of a kind on the claim that it breaks; on all claims where the slow tests have run."""
    if ("all", kind) in REPORTS:
        return REPORTS["all", kind]
    if ("own", kind) not in REPORTS:
        plugin = ("-p", "conformance_mutants.own_claims")
        REPORTS["own", kind] = joined(
            [run_suite(Selection(kinds=(kind,)), catalog=catalog, pytest_args=plugin) for catalog in catalogs_of(kind)]
        )
    return REPORTS["own", kind]


def joined(reports: list[Report]) -> Report:
    return dataclasses.replace(reports[0], outcomes=tuple(outcome for report in reports for outcome in report.outcomes))


def left_out(kind: SubjectKind, catalog: str) -> tuple[str, ...]:
    """Subjects of this catalog that conformance tries as well: a part of this repository alone, as it is installed."""
    module, _, function = catalog.partition(":")
    own = subjects(getattr(import_module(module), function)(), Selection(kinds=(kind,)))
    return tuple(
        f"{kind}:{subject.id}" for subject in own if len(subject.parts) == 1 and is_installed(subject.parts[0].spec)
    )


def is_installed(spec: Spec) -> bool:
    package = spec.build.partition(":")[0].rpartition(".")[0]
    if not package.startswith("unirl.") or package.startswith("unirl.conformance"):
        return False
    plugin = Catalog.of({package: import_module(f"{package}.plugin")})
    return any(result.spec == spec for result in plugin.parts())


def failures(report: Report, name: str) -> dict[str, str]:
    """Claims that fail on the part of this name, with the reasons."""
    outcomes = [o for o in report.outcomes if o.state == "fail" and name in o.subject.split("+")]
    return {outcome.claim: outcome.reason for outcome in outcomes}


@pytest.mark.parametrize("kind", KINDS)
def test_every_claim_has_a_mutant(kind: SubjectKind) -> None:
    assert {mutant.claim for mutant in mutants_of(kind)} == {claim.name for claim in all_claims([kind])}


def test_every_kind_of_subject_has_mutants() -> None:
    assert KINDS == SUBJECT_KINDS


# Every claim of a kind on every part: minutes.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "mutant"), params())
def test_a_mutant_fails_its_claim_and_no_other(kind: SubjectKind, mutant: Mutant) -> None:
    result = failures(report_on_all_claims(kind), mutant.name)
    assert result.keys() == {mutant.claim, *mutant.also}, result


# Installed parts are left to conformance itself, which the gate runs.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_healthy_parts_fail_nothing(kind: SubjectKind) -> None:
    broken = {mutant.name for mutant in mutants_of(kind)}
    healthy = [o for o in report_on_all_claims(kind).outcomes if not broken & set(o.subject.split("+"))]
    assert [(o.claim, o.subject, o.reason) for o in healthy if o.state in ("fail", "not run")] == []
    assert healthy or any(left_out(kind, catalog) for catalog in catalogs_of(kind)), f"no healthy {kind} is tried"


@pytest.mark.parametrize(("kind", "mutant"), params(without=SLOW))
def test_a_mutant_fails_its_claim(kind: SubjectKind, mutant: Mutant) -> None:
    assert mutant.claim in failures(report_on_own_claims(kind), mutant.name)
