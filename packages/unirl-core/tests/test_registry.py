"""The registry of known parts tells the truth about what is installed here."""

from __future__ import annotations

import pytest
from unirl.core.catalog import Catalog
from unirl.core.registry import KnownPart, Registry, install_hint, known_parts, read_registry
from unirl.core.spec import KINDS


def test_every_part_of_the_workspace_is_known_with_its_dist() -> None:
    registry = known_parts()
    ours = [part for part in Catalog.discover().parts() if part.dist.startswith("unirl-")]
    assert ours
    wrong = {
        (part.spec.kind, part.spec.name): known
        for part in ours
        if (known := registry.part(part.spec.kind, part.spec.name)) is None or known.planned or known.dist != part.dist
    }
    assert wrong == {}


def test_every_entry_is_whole() -> None:
    for part in known_parts().parts:
        assert part.kind in (*KINDS, "asset")
        assert part.dist.startswith("unirl-")
        assert part.summary.endswith(".")


def test_a_hint_gives_an_install_line_only_for_what_is_published() -> None:
    assert install_hint("tracker", "wandb") == "Install it: `pip install unirl-tracker-wandb`."
    assert install_hint("launcher", "nobody-knows") == ""
    planned = KnownPart(kind="model", name="x", dist="unirl-model-x", summary="s", planned=True)
    assert planned.hint == "it is planned as unirl-model-x and not published yet"


def test_an_entry_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(TypeError, match="distt"):
        read_registry({"model": {"x": {"distt": "unirl-model-x", "summary": "s"}}})


def test_a_part_stands_in_the_registry_once() -> None:
    part = KnownPart(kind="model", name="x", dist="d", summary="s")
    with pytest.raises(ValueError, match="model 'x' stands there twice"):
        Registry([part, part])
