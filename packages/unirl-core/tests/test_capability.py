"""Which capabilities a part of each kind states."""

from __future__ import annotations

from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import CAPABILITIES_OF, Cap
from unirl.core.specs.spec import KINDS


def test_every_kind_has_its_list_and_every_capability_a_kind() -> None:
    assert list(CAPABILITIES_OF) == list(KINDS)
    assert {cap for caps in CAPABILITIES_OF.values() for cap in caps} == set(Cap)
    assert all(len(set(caps)) == len(caps) for caps in CAPABILITIES_OF.values())


def test_no_part_of_the_workspace_states_a_capability_of_another_kind() -> None:
    strange = {
        (result.spec.name, cap.value)
        for result in Catalog.discover().parts()
        for cap in set(result.spec.capabilities) - set(CAPABILITIES_OF[result.spec.kind])
    }
    assert strange == set()
