"""The wheels: what is in them. That they train is in tests/test_installed_wheels.py."""

from __future__ import annotations

import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMESPACES = (
    "",
    "models/",
    "engines/",
    "backends/",
    "algorithms/",
    "rewards/",
    "trackers/",
    "transports/",
    "launchers/",
)


def test_every_dist_of_the_workspace_builds(wheels: dict[str, Path]) -> None:
    members = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]
    assert len(wheels) == len(members)


def test_the_core_carries_the_public_list_of_plugins(wheels: dict[str, Path]) -> None:
    carried = zipfile.ZipFile(wheels["unirl-core"]).read("unirl/core/registry.toml")
    assert carried == (ROOT / "registry" / "plugins.toml").read_bytes()


def test_conformance_carries_its_templates(wheels: dict[str, Path]) -> None:
    inside = zipfile.ZipFile(wheels["unirl-conformance"])
    package = ROOT / "packages/unirl-conformance/src"
    folder = package / "unirl/conformance/scaffold/templates"
    for file in folder.rglob("*"):
        if file.is_file():
            assert inside.read(str(file.relative_to(package))) == file.read_bytes(), file


def test_wheels_leave_the_namespace_open_and_carry_types_and_licence(wheels: dict[str, Path]) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for name, path in wheels.items():
        wheel = zipfile.ZipFile(path)
        inside = wheel.namelist()
        shadowing = {f"unirl/{namespace}__init__.py" for namespace in NAMESPACES} & set(inside)
        assert not shadowing, f"{name} ships {shadowing}, which would hide every other dist"
        has_code = any(entry.endswith(".py") for entry in inside)
        assert not has_code or any(entry.endswith("/py.typed") for entry in inside), f"{name} ships no py.typed"
        licences = [wheel.read(entry) for entry in inside if entry.endswith("licenses/LICENSE")]
        assert licences == [licence], f"{name} ships no licence, or another one"
        strays = {entry.split("/")[0] for entry in inside} - {"unirl"}
        assert all(stray.endswith(".dist-info") for stray in strays), f"{name} ships {strays} beside the namespace"
