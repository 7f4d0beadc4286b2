"""That a plugin's dist says what installers and people need, and installs what belongs to it alone."""

from __future__ import annotations

import platform
from pathlib import PurePosixPath

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from unirl.conformance.claims import claim, claims_in
from unirl.conformance.doubles.installed import InstalledFile
from unirl.conformance.doubles.modules import find_module
from unirl.conformance.fixtures.plugin import PluginBench
from unirl.conformance.verdicts import NotRun
from unirl.core.plugins.dists import NAMESPACES, unmet
from unirl.core.plugins.loading import canonical

README_LENGTH = 400
"""Characters of a README: what it is, how to install it and one use of it do not fit in fewer."""
SIZE_BYTES = 5_000_000
"""Of all files of a dist: a hundred times the code of a part. Weights and data sets come from a hub, with a version of
their own, and not with every release of the code."""


@claim("plugin", tier="static")
def test_its_version_can_be_compared(bench: PluginBench) -> None:
    """Its version has the form of PEP 440, so that runs record it and installers order it.

    If it fails: set a version such as `0.3.1` or `1.0rc2` in pyproject.toml.
    """
    try:
        Version(bench.installed.version)
    except InvalidVersion:
        pytest.fail(f"{bench.plugin.dist} has the version {bench.installed.version!r}, which PEP 440 does not know")


@claim("plugin", tier="static")
def test_it_states_the_python_that_it_needs(bench: PluginBench) -> None:
    """It states the Python versions that it works with, and this is one of them.

    If it fails: set `requires-python` in pyproject.toml, such as `>=3.11`.
    """
    stated = bench.installed.requires_python
    assert stated, f"{bench.plugin.dist} has no requires-python, so installers put it into any Python"
    try:
        fits = SpecifierSet(stated).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        pytest.fail(f"{bench.plugin.dist} has requires-python {stated!r}, which no installer can read")
    assert fits, f"{bench.plugin.dist} requires Python {stated}; this is {platform.python_version()}"


@claim("plugin", tier="static")
def test_it_requires_the_core(bench: PluginBench) -> None:
    """Installing it alone brings `unirl-core`, which it cannot work without.

    If it fails: add `unirl-core`, with a lower bound once it has releases, to `dependencies` in pyproject.toml.
    """
    names = [canonical(requirement.name) for requirement in _requirements(bench)]
    assert "unirl-core" in names, f"{bench.plugin.dist} requires {', '.join(names) or 'nothing'}, and not unirl-core"


@claim("plugin", tier="static")
def test_every_requirement_is_met_here(bench: PluginBench) -> None:
    """What it requires is installed in this environment, in a version that it accepts.

    If it fails: install what the sentence names. Where two plugins ask for versions that exclude each other, widen the
    bounds of the one that works with more, or give one an environment of its own.
    """
    wrong = [
        f"{requirement} is required; {sentence}"
        for requirement in _requirements(bench)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and (sentence := unmet(requirement))
    ]
    assert not wrong, f"{bench.plugin.dist}: {' '.join(wrong)}"


@claim("plugin", tier="static")
def test_its_readme_names_what_it_provides(bench: PluginBench) -> None:
    """Its page in a package index says what it is, and names every part that a recipe can choose.

    If it fails: set `readme` in pyproject.toml; write what it provides, how to install it, and one use of each part.
    """
    text = bench.installed.readme.strip()
    length = len(text)
    assert length >= README_LENGTH, f"its README has {length} characters; one that helps has {README_LENGTH} or more"
    missing = [spec.name for spec in bench.plugin.specs if spec.name not in text]
    assert not missing, f"its README does not name {', '.join(map(repr, missing))}"


@claim("plugin", tier="static")
def test_it_has_a_one_line_summary(bench: PluginBench) -> None:
    """Its metadata has a summary, which searches and `pip show` print.

    If it fails: set `description` in pyproject.toml to one line.
    """
    summary = bench.installed.summary
    assert len(summary.split()) >= 3, f"{bench.plugin.dist} has the summary {summary!r}, which says too little"


@claim("plugin", tier="static")
def test_it_carries_its_licence(bench: PluginBench) -> None:
    """It states its licence and comes with the text; without it, nobody may use it.

    If it fails: set `license` and `license-files` in pyproject.toml, and put the text into a file LICENSE beside it.
    """
    assert bench.installed.licence, f"{bench.plugin.dist} states no licence"
    assert bench.installed.licence_files, f"{bench.plugin.dist} states {bench.installed.licence!r}, without its text"


@claim("plugin", tier="static")
def test_its_package_is_typed(bench: PluginBench) -> None:
    """Type checkers use its annotations: its package has the marker `py.typed`.

    If it fails: put an empty file `py.typed` beside the `__init__.py` of the package, and see that the wheel has it.
    """
    names = {file.name for file in _files(bench)}
    wrong = [package for package in bench.installed.packages if _folder(package) / "py.typed" not in names]
    assert not wrong, f"no py.typed in {', '.join(wrong)}, so that type checkers pass over it"


@claim("plugin", tier="static")
def test_shared_namespaces_stay_open(bench: PluginBench) -> None:
    """It puts no `__init__.py` into a folder that many dists share, such as `unirl/` or `unirl/engines/`.

    One such file hides the parts of every other dist.

    If it fails: delete the file that the sentence names, and keep it out of the wheel.
    """
    shared = [_folder(name) for name in NAMESPACES]
    closing = {place for folder in shared for place in (folder / "__init__.py", folder.with_suffix(".py"))}
    wrong = [str(file.name) for file in _files(bench) if file.name in closing]
    assert not wrong, f"{bench.plugin.dist} installs {', '.join(wrong)}"


@claim("plugin", tier="static")
def test_nothing_is_installed_outside_its_package(bench: PluginBench) -> None:
    """What it installs stands in its own package: not loose among all modules, and not in a package of another dist.

    If it fails: the build takes in folders such as `tests`, `docs` or `scripts`, or files of another dist's package.
    Name the package in the settings of the build backend.
    """
    # A shared namespace that it closes is another claim's.
    shared = {str(_folder(name) / "__init__.py") for name in NAMESPACES}
    shared |= {str(_folder(name).with_suffix(".py")) for name in NAMESPACES}
    wrong = [name for file in _files(bench) if (name := str(file.name)) not in shared and not _is_own(bench, file)]
    assert not wrong, f"{bench.plugin.dist} installs {', '.join(sorted(wrong)[:5])}, outside its package"


@claim("plugin", tier="static")
def test_no_tests_are_installed(bench: PluginBench) -> None:
    """Its tests stay in its repository: installed ones cost room, and import what users do not have.

    If it fails: move them out of the package, next to `src`, or leave them out of the wheel.
    """
    wrong = [str(file.name) for file in _files(bench) if _is_test(file)]
    assert not wrong, f"{bench.plugin.dist} installs {', '.join(wrong[:5])}"


@claim("plugin", tier="static")
def test_nothing_large_is_installed(bench: PluginBench) -> None:
    """It installs code and small data: at most 5 MB in all. Weights and data sets are downloaded when they are used.

    If it fails: the sentence names the largest file. Publish it on a hub and let the config take its name.
    """
    sizes = {str(file.name): file.path.stat().st_size for file in _files(bench) if file.path.is_file()}
    total = sum(sizes.values())
    bench.record("installed bytes", total)
    largest = max(sizes, key=lambda name: sizes[name], default="")
    assert total <= SIZE_BYTES, (
        f"{bench.plugin.dist} installs {total} bytes, {sizes[largest]} of them {largest}; {SIZE_BYTES} are allowed"
    )


def _requirements(bench: PluginBench) -> list[Requirement]:
    try:
        return [Requirement(line) for line in bench.installed.requires]
    except InvalidRequirement as error:
        pytest.fail(f"{bench.plugin.dist} has a requirement that no installer can read: {error}")


def _files(bench: PluginBench) -> list[InstalledFile]:
    try:
        return bench.installed.files
    except FileNotFoundError as error:
        raise NotRun(f"{error}") from error


def _folder(module: str) -> PurePosixPath:
    return PurePosixPath(*module.split("."))


def _is_own(bench: PluginBench, file: InstalledFile) -> bool:
    """In its metadata, in the package of one of its entry points, a program that it names, or a top-level module that
    begins with the name of its dist or of its package (`acme_kernels` of `acme`)."""
    top = file.name.parts[0]
    if top.endswith((".dist-info", ".egg-info")):
        return True
    scripts = {point.name for point in bench.installed.dist.entry_points if point.group.endswith("_scripts")}
    if top == ".." and file.name.parent.name == "bin" and file.name.name in scripts:
        return True
    for package in bench.installed.packages:
        spec = find_module(package)
        is_folder = spec is None or spec.submodule_search_locations is not None
        place = _folder(package) if is_folder else _folder(package).with_suffix(".py")
        if file.name == place or place in file.name.parents:
            return True
    mine = {canonical(bench.plugin.dist), *(canonical(package.split(".")[0]) for package in bench.installed.packages)}
    named = canonical(PurePosixPath(top).stem)
    return any(named == name or named.startswith(f"{name}-") for name in mine - {"unirl"})


def _is_test(file: InstalledFile) -> bool:
    """A test or a folder of them. The claims of conformance are written as tests, and are none of the plugin's own."""
    name = file.name.name
    if {"tests", "test"} & set(file.name.parts[:-1]) or name == "conftest.py":
        return True
    if file.name.suffix != ".py" or not (name.startswith("test_") or name.endswith("_test.py")):
        return False
    return not claims_in(file.path.read_text(encoding="utf-8"))
