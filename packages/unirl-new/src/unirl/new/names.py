"""The names of a new plugin, and the check that they are valid and free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

from unirl.core.errors import RecipeError
from unirl.core.names import canonical
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.loading import PART_NAME
from unirl.core.plugins.registry import Registry, known_parts
from unirl.new.kinds import KINDS, NewKind

__all__ = ["Names", "check_names"]

LONGEST = 30
"""Characters of a part's name. Longer ones make recipes and tables hard to read."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of the plugin: its part, dist, package and class."""

    kind: NewKind
    name: str
    """Name of the part in recipes."""
    dist: str
    """Name for `pip install`."""

    @property
    def package(self) -> str:
        """Import name: a top-level package, outside of the namespace `unirl`."""
        return f"{self.name.replace('-', '_')}_{self.kind}"

    @property
    def class_name(self) -> str:
        """Name of the part's class."""
        return "".join(word.capitalize() for word in self.name.split("-"))

    @classmethod
    def of(cls, kind: NewKind, name: str, *, dist: str = "") -> Names:
        """dist: another than `unirl-<kind>-<name>`."""
        return cls(kind=kind, name=name, dist=dist or f"unirl-{KINDS[kind].prefix}-{name}")


def check_names(names: Names, *, catalog: Catalog, registry: Registry | None = None) -> None:
    """Raises RecipeError for names of the wrong form, and for those that are taken here or in the registry."""
    kind, name, dist = names.kind, names.name, names.dist
    if not PART_NAME.fullmatch(name) or not name[0].isalpha() or len(name) > LONGEST:
        near = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")[:LONGEST]
        hint = f"; did you mean {near!r}?" if PART_NAME.fullmatch(near) and near[0].isalpha() else "."
        raise RecipeError(
            f"NAME: got {name!r}, expected lower case letters and digits with dashes between them, beginning "
            f"with a letter, at most {LONGEST} characters{hint}"
        )
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", dist):
        raise RecipeError(f"--dist: got {dist!r}, expected its normalised form, {canonical(dist).strip('-')!r}.")
    registry = known_parts() if registry is None else registry
    for result in catalog.parts():
        if (result.spec.kind, result.spec.name) == (kind, name):
            raise RecipeError(
                f"NAME: {kind} {name!r} is installed here, from {result.dist} {result.version}. Two dists with one "
                "name cannot be used together; choose another."
            )
    known = registry.part(kind, name)
    if known is not None:
        whose = f"planned as {known.dist}" if known.planned else f"that of {known.dist}"
        raise RecipeError(f"NAME: {kind} {name!r} is {whose} in the registry of plugins; choose another name.")
    if any(part.dist == dist for part in registry.parts) or _is_installed(dist):
        raise RecipeError(f"--dist: there is a dist {dist!r} already; choose another with --dist.")
    if find_spec(names.package) is not None:
        raise RecipeError(
            f"NAME: a package {names.package!r} can be imported here already; choose another name, so that neither "
            "hides the other."
        )


def _is_installed(dist: str) -> bool:
    try:
        distribution(dist)
    except PackageNotFoundError:
        return False
    return True
