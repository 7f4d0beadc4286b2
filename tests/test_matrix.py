"""The published matrix is that of these parts and these claims."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.environment import suite_hash
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.results import Report, load
from unirl.conformance.subjects import subjects
from unirl.core.plugins.catalog import Catalog

pytestmark = pytest.mark.whole_tree

FOLDER = Path(__file__).parents[1] / "conformance"
AGAIN = "Run `unirl conformance --tier full --report conformance/run` and move its files to conformance/."


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
