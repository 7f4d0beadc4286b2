"""The published matrix is that of these parts and these claims."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.report.file import load, to_json
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.results import Outcome, Report
from unirl.conformance.subjects import not_applicable, subjects
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


def test_the_published_files_are_small_and_the_matrix_fits_on_four_screens(published: Report) -> None:
    assert (FOLDER / "conformance.json").read_text(encoding="utf-8") == to_json(published), AGAIN
    assert (FOLDER / "conformance.json").stat().st_size < 1_500_000
    lines = (FOLDER / "MATRIX.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    blocks = "\n".join(lines).split("```")[1::2]
    assert blocks and all(len(line) <= 120 for block in blocks for line in block.splitlines())
    for engine in {subject.names["engine"] for subject in published.subjects if subject.kind == "engine"}:
        rows = [line for block in blocks for line in block.splitlines() if line.startswith(f"{engine} ")]
        assert rows and all(re.search(r"[✓△◐]\d", row) for row in rows), f"no log-prob mismatch with {engine}"


@pytest.mark.slow
def test_the_published_run_made_these_claims_on_these_parts(published: Report) -> None:
    assert published.tier == "full"
    catalog = Catalog.discover()
    has_gpu = "cuda" in {subject.device for subject in published.subjects}
    applies = {
        (subject.kind, subject.id)
        for subject in subjects(catalog, tier="full")
        if has_gpu or subject.device == "cpu"
        if any(claim.kind == subject.kind and not not_applicable(claim, subject) for claim in all_claims())
    }
    assert {(subject.kind, subject.id) for subject in published.subjects} == applies, AGAIN
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
    """A run of these claims on these subjects alone."""
    about = {(one.kind, one.subject) for one in outcomes}
    subjects = tuple(one for one in published.subjects if (one.kind, one.id) in about)
    claims = tuple(one for one in published.claims if one.name in {outcome.claim for outcome in outcomes})
    return dataclasses.replace(published, tier="tiny", claims=claims, subjects=subjects, outcomes=outcomes, untried=())


def test_the_last_run_of_a_claim_counts_and_the_others_stay(published: Report, merge: Merge) -> None:
    passed = next(one for one in published.outcomes if one.state == "pass" and one.kind == "cell")
    catalog = Catalog.discover()
    before = states(merge(published, [narrow_run(published, passed)], catalog))
    other, last = (dataclasses.replace(passed, state=state, reason="tried now") for state in ("not run", "gap"))
    merged = merge(published, [narrow_run(published, other), narrow_run(published, last)], catalog)
    changed = {key: state for key, state in states(merged).items() if before[key] != state}
    assert changed == {(passed.claim, passed.kind, passed.subject): "gap"}
    assert merged.tier == "full"


def test_a_claim_that_found_itself_not_applicable_stays_so(published: Report, merge: Merge) -> None:
    catalog = Catalog.discover()
    passed = next(one for one in published.outcomes if one.state == "pass" and one.kind == "reward")
    before = merge(published, [narrow_run(published, passed)], catalog)
    assert before.counts == published.counts
    # The subject was tried with this claim, and has no outcome for it.
    without = dataclasses.replace(published, outcomes=tuple(one for one in published.outcomes if one != passed))
    other = next(one for one in published.outcomes if one.subject == passed.subject and one != passed)
    after = merge(without, [narrow_run(published, other)], catalog)
    assert after.count("n/a") == before.count("n/a") + 1 and after.count("pass") == before.count("pass") - 1


def test_parts_that_went_together_after_the_publication_are_not_run(published: Report, merge: Merge) -> None:
    subject = next(one.subject for one in published.outcomes if one.kind == "engine" and one.state == "pass")
    refused = dataclasses.replace(
        published,
        subjects=tuple(one for one in published.subjects if (one.kind, one.id) != ("engine", subject)),
        outcomes=tuple(one for one in published.outcomes if (one.kind, one.subject) != ("engine", subject)),
    )
    other = next(one for one in published.outcomes if one.kind == "model")
    merged = states(merge(refused, [narrow_run(published, other)], Catalog.discover()))
    assert {state for key, state in merged.items() if key[1:] == ("engine", subject)} == {"not run"}


def test_a_run_of_a_claim_that_is_not_installed_is_refused(published: Report, merge: Merge) -> None:
    other = dataclasses.replace(published.claims[0], name="a-claim-of-last-year")
    run = dataclasses.replace(published, claims=(*published.claims, other))
    with pytest.raises(RecipeError, match="'a-claim-of-last-year', which is not installed: run conformance again"):
        merge(published, [run], Catalog.discover())
