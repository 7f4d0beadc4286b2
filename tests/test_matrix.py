"""The published matrix is that of these parts and these claims."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.environment import suite_hash
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.results import Outcome, Report, load
from unirl.conformance.subjects import subjects
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog

FOLDER = Path(__file__).parents[1] / "conformance"
AGAIN = "Run `unirl conformance --report conformance/run`, then `python tools/publish_matrix.py conformance/run`."

Merge = Callable[[Report, list[Report], Catalog], Report]


@pytest.fixture(scope="module")
def published() -> Report:
    return load(FOLDER / "conformance.json")


def test_the_matrix_is_written_from_the_published_run(published: Report) -> None:
    assert (FOLDER / "MATRIX.md").read_text(encoding="utf-8") == matrix_md(published), AGAIN


def test_the_published_run_made_these_claims_on_these_parts(published: Report) -> None:
    assert published.tier == "full"
    assert published.suite == suite_hash(), f"the claims have changed since the matrix was published. {AGAIN}"
    catalog = Catalog.discover()
    result = {(subject.kind, subject.id) for subject in subjects(catalog, tier="full")}
    assert {(subject.kind, subject.id) for subject in published.subjects} == result, AGAIN
    assert {(claim.name, claim.kind) for claim in published.claims} == {(c.name, c.kind) for c in all_claims()}, AGAIN
    assert dict(published.dists) == {record.dist: record.version for record in catalog.records}, AGAIN


def test_nothing_in_the_published_run_failed(published: Report) -> None:
    assert [(o.claim, o.subject, o.reason) for o in published.outcomes if o.state == "fail"] == []


@pytest.fixture(scope="module")
def merge() -> Merge:
    place = FOLDER.parent / "tools" / "publish_matrix.py"
    spec = importlib.util.spec_from_file_location("publish_matrix", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge


def states(report: Report) -> dict[tuple[str, str, str], str]:
    return {(one.claim, one.kind, one.subject): one.state for one in report.outcomes}


def narrow_run(published: Report, *outcomes: Outcome) -> Report:
    about = {(one.kind, one.subject) for one in outcomes}
    subjects = tuple(one for one in published.subjects if (one.kind, one.id) in about)
    return dataclasses.replace(published, tier="tiny", subjects=subjects, outcomes=outcomes)


def test_the_last_run_of_a_claim_counts_and_the_others_stay(published: Report, merge: Merge) -> None:
    passed = next(one for one in published.outcomes if one.state == "pass" and one.kind == "cell")
    catalog = Catalog.discover()
    before = states(merge(published, [narrow_run(published, passed)], catalog))
    other, last = (dataclasses.replace(passed, state=state, reason="tried now") for state in ("not run", "gap"))
    merged = merge(published, [narrow_run(published, other), narrow_run(published, last)], catalog)
    changed = {key: state for key, state in states(merged).items() if before[key] != state}
    assert changed == {(passed.claim, passed.kind, passed.subject): "gap"}
    assert merged.tier == "full"


def test_parts_that_went_together_after_the_publication_are_not_run(published: Report, merge: Merge) -> None:
    subject = next(one.subject for one in published.outcomes if one.kind == "engine" and one.state == "pass")
    refused = dataclasses.replace(
        published,
        outcomes=tuple(
            dataclasses.replace(one, state="n/a") if (one.kind, one.subject) == ("engine", subject) else one
            for one in published.outcomes
        ),
    )
    other = next(one for one in published.outcomes if one.kind == "model")
    merged = states(merge(refused, [narrow_run(published, other)], Catalog.discover()))
    of_it = {state for key, state in merged.items() if key[1:] == ("engine", subject)}
    assert of_it == {"n/a", "not run"} or of_it == {"not run"}


def test_a_run_of_other_claims_is_refused(published: Report, merge: Merge) -> None:
    with pytest.raises(RecipeError, match="run conformance again"):
        merge(published, [dataclasses.replace(published, suite="0" * 16)], Catalog.discover())
