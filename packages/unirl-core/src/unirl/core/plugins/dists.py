"""Installed dists, and their unmet requirements."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from ..names import canonical

__all__ = ["find_unmet", "installed_version", "unmet"]


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
