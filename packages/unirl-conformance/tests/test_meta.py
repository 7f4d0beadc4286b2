"""All claims together: they are complete, explained, and end the same way however they are run."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance import claims as claims_module
from unirl.conformance.claims import (
    SUBJECT_KINDS,
    Claim,
    SubjectKind,
    all_claims,
    claim_kinds,
    claims_in,
    suite_modules,
)
from unirl.conformance.pytest_plugin import CASES
from unirl.core.specs.capability import Cap

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def source(module: str) -> str:
    return files(f"{claims_module.__package__}.suite").joinpath(f"{module}.py").read_text(encoding="utf-8")


def claim_ids() -> list[Any]:
    return [pytest.param(claim, id=claim.name) for claim in all_claims()]


@pytest.mark.parametrize("cap", Cap)
def test_a_capability_has_a_claim(cap: Cap) -> None:
    assert any(cap in claim.proves for claim in all_claims()), f"no claim proves {cap.value!r}"


@pytest.mark.parametrize("claim", claim_ids())
def test_a_claim_says_what_it_means_and_where_to_look(claim: Claim) -> None:
    # A sentence that says something has at least eight words.
    assert len(claim.meaning.split()) >= 8, f"its meaning is {claim.meaning!r}"
    assert claim.meaning.endswith((".", "?", ":")), f"its meaning ends in {claim.meaning[-20:]!r}"
    # What to do and where takes five words or more: "raise a RecipeError in `load_weights`".
    assert len(claim.if_it_fails.split()) >= 5, f"where to look is {claim.if_it_fails!r}"


@pytest.mark.parametrize("claim", claim_ids())
def test_a_claim_proves_capabilities_that_its_subjects_have(claim: Claim) -> None:
    assert all(claim.kind in cap.kinds for cap in claim.proves), f"a {claim.kind} has no such capability"
    for kind, caps in claim.needs.items():
        assert all(kind in cap.kinds for cap in caps)


@pytest.mark.parametrize("kind", SUBJECT_KINDS)
def test_a_kind_of_subject_has_claims_a_case_and_mutants(kind: SubjectKind) -> None:
    assert [claim for claim in all_claims([kind]) if claim.kind == kind], f"nothing is claimed of a {kind}"
    named = [name for key, name in CASES.items() if kind in (key, key[0])]
    assert named, f"claims about a {kind} are given nothing"
    for name in named:
        module, _, cls = name.partition(":")
        assert isinstance(getattr(import_module(f"unirl.conformance.fixtures.{module}"), cls), type)
    assert (HERE / "conformance_mutants" / f"{kind}.py").is_file(), f"no mutants show that claims of a {kind} can fail"


def test_names_of_claims_are_unique_and_read_alike_with_and_without_importing() -> None:
    stated = [name for module in suite_modules() for name in claims_in(source(module))]
    assert len(stated) == len(set(stated))
    assert {claim.name: claim.kind for claim in all_claims()} == claim_kinds()


def test_every_module_of_the_suite_belongs_to_the_kind_in_its_name() -> None:
    for kind in SUBJECT_KINDS:
        assert {claim.kind for claim in all_claims([kind])} == {kind}
