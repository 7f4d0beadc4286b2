"""The registry of known parts tells the truth about what is installed here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from unirl.core.names import canonical
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.entry_points import COMMANDS_GROUP, entry_points
from unirl.core.plugins.loading import PART_NAME
from unirl.core.plugins.registry import DATA_FILE, KnownPart, Registry, install_hint, known_parts, read_registry
from unirl.core.specs.spec import KINDS


def test_every_part_of_the_workspace_is_known_with_its_dist() -> None:
    registry = known_parts()
    ours = [part for part in Catalog.discover().parts() if part.dist.startswith("unirl-")]
    assert ours
    wrong = {
        (part.spec.kind, part.spec.name): known
        for part in ours
        if (known := registry.part(part.spec.kind, part.spec.name)) is None or known.planned or part.dist != known.dist
    }
    assert wrong == {}


def test_every_command_of_the_workspace_is_known_with_its_dist() -> None:
    known = {part.name: part.dist for part in known_parts().parts if part.kind == "command"}
    assert known == {point.name: point.dist for point in entry_points(COMMANDS_GROUP)}


def test_every_entry_is_whole() -> None:
    for part in known_parts().parts:
        entry = f"{part.kind}.{part.name}"
        assert part.kind in (*KINDS, "asset", "command"), entry
        assert PART_NAME.fullmatch(part.name), entry
        assert part.dist == canonical(part.dist), f"{entry}: write the dist as package indexes do"
        assert part.summary.endswith(".") and 10 < len(part.summary) <= 100, entry
        assert bool(part.by) == bool(part.home), f"{entry}: `by` and `home` come together"
        assert not part.home or part.home.startswith("https://"), entry


def test_parts_without_a_maintainer_are_of_this_repository() -> None:
    """Anything else is somebody's, and a user who installs it should know whose."""
    workspace = {dist for record in Catalog.discover().records if (dist := record.dist).startswith("unirl-")}
    workspace |= {part.dist for part in known_parts().parts if part.kind == "asset"}
    workspace |= {point.dist for point in entry_points(COMMANDS_GROUP)}
    for part in known_parts().parts:
        if part.planned:
            assert not part.by, f"{part.kind}.{part.name}: only what is published is listed"
        elif part.by:
            assert part.dist not in workspace, f"{part.kind}.{part.name} is of this repository"
        else:
            assert part.dist in workspace, f"{part.kind}.{part.name}: say who maintains {part.dist}, and its home page"


def test_lines_stand_in_the_order_of_the_alphabet() -> None:
    parts = known_parts().parts
    for kind in {part.kind for part in parts}:
        names = [part.name for part in parts if part.kind == kind]
        assert names == sorted(names), kind


def test_the_list_of_the_repository_is_the_one_that_the_package_carries() -> None:
    public = Path(__file__).parents[3] / "registry" / "plugins.toml"
    carried = Path(str(files("unirl.core").joinpath(DATA_FILE)))
    assert not public.is_symlink() and carried.resolve() == public


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
    with pytest.raises(ValueError, match="duplicate entry for model 'x'"):
        Registry([part, part])
