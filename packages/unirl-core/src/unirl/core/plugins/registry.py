"""Known parts and the dists that provide them, so that an error about a missing part can say how to install it.

The list is `registry/plugins.toml` of the repository, which documents its format; the wheel contains it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["KnownPart", "Registry", "install_hint", "known_parts"]

DATA_FILE = "registry.toml"


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """One line of the registry."""

    kind: str
    """A kind of part, `asset` or `command`."""
    name: str
    dist: str
    summary: str
    by: str = ""
    """Who maintains it; empty for the parts of the UniRL repository."""
    home: str = ""
    """Its home page."""
    planned: bool = False
    """Not published yet: there is nothing to install."""

    @property
    def hint(self) -> str:
        """How to get the part, without a full stop."""
        if self.planned:
            return f"it is planned as {self.dist} and not published yet"
        return f"install it: `pip install {self.dist}`"


class Registry:
    """Known parts by kind and name."""

    def __init__(self, parts: Iterable[KnownPart]) -> None:
        self.parts = tuple(parts)
        self._by_name = {(part.kind, part.name): part for part in self.parts}
        if len(self._by_name) != len(self.parts):
            keys = [(part.kind, part.name) for part in self.parts]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{DATA_FILE}: duplicate entry for {twice[0]} {twice[1]!r}.")

    def part(self, kind: str, name: str) -> KnownPart | None:
        return self._by_name.get((kind, name))

    def names(self, kind: str) -> list[str]:
        """Names of a kind, planned ones included."""
        return [part.name for part in self.parts if part.kind == kind]


@cache
def known_parts() -> Registry:
    """The registry of this release."""
    data = tomllib.loads(files("unirl.core").joinpath(DATA_FILE).read_text(encoding="utf-8"))
    return read_registry(data)


def read_registry(data: dict[str, Any]) -> Registry:
    """A registry from its TOML: for each kind a table of name -> {dist, summary, by, home, planned}."""
    return Registry(
        KnownPart(kind=kind, name=name, **entry) for kind, entries in data.items() for name, entry in entries.items()
    )


def install_hint(kind: str, name: str) -> str:
    """A sentence on how to get a part: its install line, or that it is not published yet; empty for an unknown part."""
    part = known_parts().part(kind, name)
    return f"{part.hint[0].upper()}{part.hint[1:]}." if part else ""
