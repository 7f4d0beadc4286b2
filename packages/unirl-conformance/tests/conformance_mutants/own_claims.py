"""Pytest plugin of a conformance run that tries each mutant on the claim that it breaks, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from unirl.conformance.claims import claim_of

from conformance_mutants.mutant import mutants_of

SLOW = ("training-raises-the-reward",)
"""Claims that take more than ten seconds on one part."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    (kind,) = config.getoption("--unirl-kind")
    own = {(mutant.claim, mutant.name) for mutant in mutants_of(kind) if mutant.claim not in SLOW}
    items[:] = [item for item in items if is_own(item, own)]


def is_own(item: Any, own: set[tuple[str, str]]) -> bool:
    claim, subject = claim_of(item.function), item.callspec.params["subject"]
    assert claim is not None
    return any((claim.name, part) in own for part in subject.id.split("+"))
