"""Installed dists: unmet requirements, and files that shadow the shared namespaces."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from ..names import canonical

__all__ = ["NAMESPACES", "find_shadows", "find_unmet", "installed_version", "unmet"]


NAMESPACES = (
    "unirl",
    "unirl.models",
    "unirl.engines",
    "unirl.backends",
    "unirl.algorithms",
    "unirl.rewards",
    "unirl.trackers",
    "unirl.launchers",
    "unirl.transports",
)
"""Namespace packages shared by many dists. A dist that ships an `__init__.py` for one hides the parts of all others."""


def find_shadows(path: Iterable[str]) -> Iterator[str]:
    """A sentence for each file on this module path that turns a shared namespace into an ordinary package or module."""
    seen: set[Path] = set()
    for entry in path:
        root = Path(entry or ".").resolve()
        if root in seen or not root.is_dir():
            continue
        seen.add(root)
        for namespace in NAMESPACES:
            place = root.joinpath(*namespace.split("."))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    owner = _owner_of(file, root)
                    yield (
                        f"{file} makes {namespace!r} a plain module, which hides every other dist that shares it. "
                        + (f"It belongs to {owner}: uninstall it." if owner else "No dist owns it: delete it.")
                    )


def find_unmet(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each unmet requirement of these dists and of their dependencies."""
    waiting = [(name, frozenset[str]()) for name in sorted(names)]
    seen, told = set(waiting), set[str]()
    while waiting:
        name, extras = waiting.pop(0)
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        if not extras:
            yield from _unmet_python(dist)
        for requirement in _requirements(dist, extras):
            sentence = unmet(requirement)
            if sentence:
                text = f"{name} {dist.version} requires {_written(requirement)}; {sentence}"
                # A dist that is required with and without extras is visited twice.
                if text not in told:
                    told.add(text)
                    yield text
                continue
            further = (canonical(requirement.name), frozenset(requirement.extras))
            for item in (further, (further[0], frozenset[str]())):
                if item not in seen:
                    seen.add(item)
                    waiting.append(item)


def _requirements(dist: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in dist.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            # Metadata of old dists, which installers no longer read either.
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def unmet(requirement: Requirement) -> str:
    """Why a requirement is not met, as a sentence; empty if it is. The caller evaluates its marker."""
    version = installed_version(requirement.name)
    if version is None:
        return f"it is not installed. Install it: `pip install '{_written(requirement)}'`."
    try:
        fits = requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return f"installed is {version!r}, which is not a valid version."
    return "" if fits else f"installed is {version}. Install a matching one: `pip install '{_written(requirement)}'`."


def _unmet_python(dist: Distribution) -> Iterator[str]:
    expected = cast(Mapping[str, str | None], dist.metadata).get("Requires-Python")
    try:
        fits = not expected or SpecifierSet(expected).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        return
    if not fits:
        yield f"{dist.name} {dist.version} requires Python {expected}; this is Python {platform.python_version()}."


def _written(requirement: Requirement) -> str:
    """A requirement without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def installed_version(name: str) -> str | None:
    """Version of a dist; None when it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _owner_of(file: Path, root: Path) -> str | None:
    """The installed dist that lists a file, or whose editable folder this is."""
    for dist in distributions():
        for item in dist.files or ():
            if item.name == file.name and Path(str(dist.locate_file(item))).resolve() == file:
                return f"{dist.name} {dist.version}"
            # An editable install lists a .pth file that holds its source folder.
            if item.suffix == ".pth":
                pth = Path(str(dist.locate_file(item)))
                if pth.is_file() and str(root) in pth.read_text(encoding="utf-8", errors="replace").split("\n"):
                    return f"{dist.name} {dist.version}"
    return None
