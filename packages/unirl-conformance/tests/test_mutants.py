"""Every claim fails on a part that is broken in the way it is about, and there alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind, all_claims
from unirl.conformance.results import Report
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection, subjects
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import Spec

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants.mutant import KINDS, Mutant, catalogs_of, mutants_of
from mutants_table import AGAIN, PAGE, table

REPORTS: dict[SubjectKind, Report] = {}


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


def report_of(kind: SubjectKind) -> Report:
    """Every quick claim of a kind, on its mutants and on the parts that are well and not installed."""
    if kind not in REPORTS:
        first, *others = (
            run_suite(Selection(kinds=(kind,), without=left_out(kind, catalog)), catalog=catalog)
            for catalog in catalogs_of(kind)
        )
        outcomes = [*first.outcomes, *(outcome for report in others for outcome in report.outcomes)]
        REPORTS[kind] = dataclasses.replace(first, outcomes=tuple(outcomes))
    return REPORTS[kind]


def failed(report: Report, name: str) -> set[str]:
    return {o.claim for o in report.outcomes if o.state == "fail" and name in o.subject.split("@")[0].split("+")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_claim_has_a_mutant(kind: SubjectKind) -> None:
    assert {mutant.claim for mutant in mutants_of(kind)} == {claim.name for claim in all_claims([kind])}


def test_every_kind_of_subject_has_mutants_and_the_published_table_is_theirs() -> None:
    assert KINDS == SUBJECT_KINDS
    assert PAGE.read_text(encoding="utf-8") == table(), f"{PAGE} is stale. {AGAIN}"


# What is installed is left to conformance itself, which the gate runs.
# Every claim of a kind on every other part that is well: minutes, where the machine is busy.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_well_fail_nothing(kind: SubjectKind) -> None:
    broken = {mutant.name for mutant in mutants_of(kind)}
    wrong = [
        (o.claim, o.subject, o.reason)
        for o in report_of(kind).outcomes
        if o.state in ("fail", "not run") and not broken & set(o.subject.split("+"))
    ]
    assert wrong == []
    tried = [o for o in report_of(kind).outcomes if not broken & set(o.subject.split("+"))]
    assert tried or any(left_out(kind, catalog) for catalog in catalogs_of(kind)), f"no {kind} that is well is tried"


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [pytest.param(kind, mutant, id=f"{kind}-{mutant.name}") for kind in KINDS for mutant in mutants_of(kind)],
)
def test_a_mutant_fails_its_claim_and_no_other(kind: SubjectKind, mutant: Mutant) -> None:
    slow = {claim.name for claim in all_claims([kind]) if claim.tier == "full"}
    report = report_of(kind)
    result = failed(report, mutant.name)
    if mutant.claim in slow:
        own = run_suite(
            Selection(kinds=(kind,), claims=(mutant.claim,)),
            tier="full",
            catalog=f"conformance_mutants.{kind}:catalog",
        )
        result |= failed(own, mutant.name)
    assert result == {mutant.claim, *mutant.also}, [
        (o.claim, o.reason) for o in report.outcomes if o.state == "fail" and mutant.name in o.subject.split("+")
    ]
