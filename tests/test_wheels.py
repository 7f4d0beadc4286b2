"""The wheels: what is in them. That they train is in tests/test_installed_wheels.py."""

from __future__ import annotations

import configparser
import email
import tomllib
import zipfile
from pathlib import Path

import pytest
from check_wheel_contents.__main__ import main as check_wheel_contents
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import API_GROUP
from validate_pyproject.api import Validator

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


PROJECTS = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path.parent
    for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"))
}
"""Name of each dist of the workspace -> its folder."""
PLUGINS = [name for name, path in PROJECTS.items() if "plugins" in path.parts and (path / "src").is_dir()]
"""Dists with a plugin. The others are only a name, and require the one that provides their part."""
README_LENGTH = 400
"""Least characters: fewer cannot describe a dist, its installation and one use of it."""
SIZE_BYTES = 5_000_000
"""Limit for an unpacked plugin: a hundred times the code of a part. Weights and data sets come from a hub."""


def test_every_dist_of_the_workspace_builds(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == PROJECTS.keys()


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_file_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise it downloads the list of classifiers.
    monkeypatch.setenv("VALIDATE_PYPROJECT_NO_NETWORK", "1")
    Validator()(tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8")))


def test_a_wheel_holds_its_sources_and_nothing_else(wheels: dict[str, Path]) -> None:
    for name, path in wheels.items():
        sources = PROJECTS[name] / "src"
        if not sources.is_dir():
            inside = zipfile.ZipFile(path).namelist()
            assert all(".dist-info/" in entry for entry in inside), f"{name} has no sources and holds {inside}"
            continue
        # W002: checkpoints share files, such as the config of a tokenizer. W004: engines carry projects that are
        # installed into their own environments.
        arguments = ["--no-config", "--ignore", "W002,W004", "--src-dir", str(sources), str(path)]
        done = CliRunner().invoke(check_wheel_contents, arguments)
        assert done.exit_code == 0, f"{done.output} {done.exception}"


def test_metadata_describe_a_dist_and_its_parts(wheels: dict[str, Path]) -> None:
    parts = Catalog.discover().parts()
    for name, path in wheels.items():
        wheel = zipfile.ZipFile(path)
        info = next(entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(info))
        assert len(metadata["Summary"].split()) >= 3, f"{name}: its description is {metadata['Summary']!r}"
        assert metadata["Requires-Python"], f"{name} has no requires-python"
        requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", ())]
        required = {each.name for each in requirements}
        is_plugin = "plugins" in PROJECTS[name].parts
        assert not is_plugin or required & {"unirl-core", *PLUGINS}, f"{name} requires neither unirl-core nor a plugin"
        # They are released together, and an older one must not be left beside a newer one.
        major, minor, _ = metadata["Version"].split(".")
        bound = SpecifierSet(f">={major}.{minor},<{major}.{int(minor) + 1}")
        loose = [str(each) for each in requirements if each.name in PROJECTS and each.specifier != bound]
        assert not loose, f"{name} requires {loose}, expected {bound} of each"
        readme = str(metadata.get_payload())
        unnamed = [part.spec.name for part in parts if part.dist == name and part.spec.name not in readme]
        assert len(readme) >= README_LENGTH and not unnamed, f"{name}: its README has no {', '.join(unnamed) or 'text'}"


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_is_found_by_its_entry_point_and_installs_code_alone(name: str, wheels: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(wheels[name])
    inside = {entry.filename: entry.file_size for entry in wheel.infolist()}
    points = configparser.ConfigParser(delimiters="=")
    points.read_string(wheel.read(next(entry for entry in inside if entry.endswith("entry_points.txt"))).decode())
    modules = [value.partition(":")[0].replace(".", "/") for value in points[API_GROUP].values()]
    assert modules and all(f"{module}.py" in inside for module in modules), f"{API_GROUP} names {modules}"
    tests = [entry for entry in inside if "tests/" in entry or entry.endswith("conftest.py")]
    assert not tests, f"it installs {tests}"
    assert sum(inside.values()) <= SIZE_BYTES, f"it installs {max(inside, key=lambda entry: inside[entry])}"


def test_the_core_carries_the_public_list_of_plugins(wheels: dict[str, Path]) -> None:
    carried = zipfile.ZipFile(wheels["unirl-core"]).read("unirl/core/registry.toml")
    assert carried == (ROOT / "registry" / "plugins.toml").read_bytes()


@pytest.mark.parametrize(
    ("dist", "folder"),
    [("unirl-new", "unirl/new/templates"), ("unirl-conformance", "unirl/conformance/report/templates")],
)
def test_templates_are_in_the_wheels(wheels: dict[str, Path], dist: str, folder: str) -> None:
    inside = zipfile.ZipFile(wheels[dist])
    package = ROOT / "packages" / dist / "src"
    for file in (package / folder).rglob("*"):
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
