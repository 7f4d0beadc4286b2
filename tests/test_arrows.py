"""Allowed imports between packages. Read from the imports themselves, so that no wrong import is missed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_imports import imports, module_name, named_modules

ROOT = Path(__file__).parents[1]
MEMBERS = sorted(
    path.parent for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]
)

HOSTS = {"unirl.model_host", "unirl.engine_host", "unirl.train_host", "unirl.tracker_host", "unirl.transfer"}
ALLOWED = {
    "unirl.core": set[str](),
    "unirl.numerics": {"unirl.core"},
    "unirl.loop": {"unirl.core", "unirl.numerics"},
    "unirl.model_host": {"unirl.core", "unirl.numerics"},
    "unirl.engine_host": {"unirl.core", "unirl.numerics", "unirl.model_host"},
    "unirl.train_host": {"unirl.core", "unirl.numerics"},
    "unirl.tracker_host": {"unirl.core"},
    "unirl.transfer": {"unirl.core", "unirl.numerics"},
    "unirl.launchers.ray": {"unirl.core", "unirl.numerics", "unirl.loop", *HOSTS},
    "unirl.tools": {"unirl.core", "unirl.numerics", "unirl.loop", "unirl.model_host"},
    "unirl.reward_service": {"unirl.core", "unirl.numerics", "unirl.loop"},
    "unirl.conformance": {"unirl.core", "unirl.numerics", "unirl.loop", "unirl.model_host"},
    "unirl.league": {"unirl.core", "unirl.numerics", "unirl.loop"},
    "unirl.datasets": {"unirl.core"},
    "unirl.new": {"unirl.core", "unirl.numerics", "unirl.model_host", "unirl.conformance"},
    "unirl.quickstart": {"unirl.core"},
    "unirl.engine_cpu": set[str](),
}
"""Packages that a package may import besides itself; everything else is a plugin."""
PLUGIN_MAY = {"unirl.core", "unirl.numerics", *HOSTS}
FOR_CONFORMANCE = ("reference.py", "parity.py")
COMPARED_BY = tuple(
    f"unirl.conformance.{name}" for name in ("reference", "pipeline_parity", "text_parity", "image_text_parity")
)
"""References of conformance. Specs name them, and modules of plugins that conformance alone imports may import them."""


def module_of(member: Path) -> str | None:
    """Import name of a dist; None where it has no code: it is another name of a dist that it requires."""
    with (member / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["uv"]["build-backend"]["module-name"] or None


PACKAGES = {module: member for member in MEMBERS if (module := module_of(member))}


def files(package: str) -> list[Path]:
    return sorted((PACKAGES[package] / "src").rglob("*.py"))


def package_of(module: str) -> str | None:
    result = [package for package in PACKAGES if module == package or module.startswith(f"{package}.")]
    return max(result, key=len, default=None)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_what_its_room_may(package: str) -> None:
    allowed = {package} | ALLOWED.get(package, PLUGIN_MAY)
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in imports(path)
        if (target := package_of(name)) is not None and target not in allowed
        if not (path.name.endswith(FOR_CONFORMANCE) and name.startswith(COMPARED_BY))
    }
    assert not wrong, f"{package} may import {sorted(allowed)}: {sorted(wrong)}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_names_in_strings_only_what_it_may_import(package: str) -> None:
    """A module that is imported by its name is an arrow, too."""
    allowed = {package} | ALLOWED.get(package, PLUGIN_MAY)
    wrong = {
        f"{path.relative_to(ROOT)} names {name}"
        for path in files(package)
        for name in named_modules(path)
        if (target := package_of(name)) is not None and target not in allowed and not name.startswith(COMPARED_BY)
    }
    assert not wrong, f"{package} may name modules of {sorted(allowed)}: {sorted(wrong)}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_declares_every_sibling_that_it_imports(package: str) -> None:
    with (PACKAGES[package] / "pyproject.toml").open("rb") as file:
        declared = {item.split(">")[0].split("=")[0].strip() for item in tomllib.load(file)["project"]["dependencies"]}
    dist_of = {
        name: tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        for name, member in PACKAGES.items()
    }
    imported = {name for path in files(package) if not path.name.endswith(FOR_CONFORMANCE) for name in imports(path)}
    used = {target for name in imported if (target := package_of(name))} - {package}
    missing = {dist_of[name] for name in used} - declared
    assert not missing, f"{package} imports from {sorted(missing)} without declaring it"


def test_no_module_is_in_an_import_circle() -> None:
    modules = {module_name(path): path for package in PACKAGES for path in files(package)}
    graph = {
        name: {target for target in imports(path) if target in modules and target != name}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import circle: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                walk(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


FLOORS = {
    "unirl.core": ("types", "specs", "roles", "plugins", "observe", "recipe", "match", "data", "cli"),
    "unirl.numerics": ("loss", "diffusion", "tokens", "train"),
}
"""Folders of a package, each of which imports those before it at most; modules beside the folders lie below them all."""


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_a_folder_imports_only_those_before_it(package: str) -> None:
    floors = FLOORS[package]
    root = PACKAGES[package].joinpath("src", *package.split("."))
    assert {path.parent.name for path in root.glob("*/*.py")} == set(floors)
    wrong = {
        f"{path.relative_to(root)} imports {name}"
        for path in files(package)
        if (folder := path.relative_to(root).parts[0]) not in ("__main__.py", "plugin.py")
        for name in imports(path, for_types=True)
        if (target := name.removeprefix(f"{package}.").split(".")[0]) in floors and name.startswith(f"{package}.")
        if folder not in floors or floors.index(target) > floors.index(folder)
    }
    assert not wrong, f"{' <- '.join(floors)}: {sorted(wrong)}"


LIGHT = [*ROOT.glob("plugins/*/*/src/**/plugin.py"), *ROOT.glob("plugins/*/*/src/**/config.py")]


@pytest.mark.parametrize("path", sorted(LIGHT), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_what_is_imported_to_list_and_compose_is_light(path: Path) -> None:
    """`plugin.py` and `config.py` import the standard library, their own package and UniRL's packages, and nothing else.
    That those stay light is the next test."""
    own = package_of(module_name(path)) or ""
    allowed = (own, *ALLOWED.get(own, PLUGIN_MAY))
    wrong = [
        name
        for name in imports(path, top_level_only=True)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "unirl"}
        or (name.startswith("unirl.") and not name.startswith(allowed))
    ]
    assert not wrong, f"{path.relative_to(ROOT)} is imported to list parts or to compose; it must not import {wrong}"


def test_importing_all_of_it_loads_nothing_heavy() -> None:
    """Nor does anything that they import. Checked in a separate process: this one has torch."""
    code = f"import sys, {', '.join(sorted(module_name(path) for path in LIGHT))}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"diffusers", "hydra", "numpy", "omegaconf", "peft", "PIL", "ray", "sympy", "torch", "transformers"}
    assert not heavy & set(loaded)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_namespace_folder_has_an_init_file(package: str) -> None:
    source = PACKAGES[package] / "src"
    leaf = source.joinpath(*package.split("."))
    between = [parent for parent in leaf.parents if parent.is_relative_to(source) and parent != source]
    wrong = [str(folder.relative_to(ROOT)) for folder in between if (folder / "__init__.py").exists()]
    assert not wrong, f"an __init__.py in {wrong} would hide every other dist of the namespace"
    assert (leaf / "py.typed").is_file(), f"{package} ships no py.typed"
