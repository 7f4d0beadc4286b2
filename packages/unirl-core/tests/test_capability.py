"""Which capabilities a part of each kind states."""

from __future__ import annotations

import pickle

from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import KINDS


def test_every_capability_is_of_a_kind_of_part() -> None:
    assert all(cap.kinds and len(set(cap.kinds)) == len(cap.kinds) and set(cap.kinds) <= set(KINDS) for cap in Cap)


def test_a_capability_is_its_name_and_goes_to_another_process_as_itself() -> None:
    assert Cap("sigmas") is Cap.SIGMAS and Cap.SIGMAS == "sigmas" and str(Cap.SIGMAS) == "sigmas"
    assert pickle.loads(pickle.dumps(Cap.LAZY_BUILD)) is Cap.LAZY_BUILD


def test_no_part_of_the_workspace_states_a_capability_of_another_kind() -> None:
    strange = {
        (result.spec.name, cap.value)
        for result in Catalog.discover().parts()
        for cap in result.spec.capabilities
        if result.spec.kind not in cap.kinds
    }
    assert strange == set()
