"""Entry points of the installed dists. They are read once for all groups, and a dist that is damaged hides no other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, cast

from ..names import canonical

__all__ = [
    "ASSETS_GROUP",
    "COMMANDS_GROUP",
    "RECIPES_GROUP",
    "InstalledDist",
    "Point",
    "entry_points",
    "installed_dists",
]

COMMANDS_GROUP = "unirl.commands"
"""Commands, a click command each. They are imported when they run, and for `unirl --help`."""
RECIPES_GROUP = "unirl.recipes"
"""Packages with recipe files. Static data: they are not imported."""
ASSETS_GROUP = "unirl.assets"
"""Packages whose files recipes refer to as `${asset:NAME,PATH}`."""


class InstalledDist:
    """A dist and its entry points. Its metadata, which takes most of the time, is read when it is asked for."""

    def __init__(self, dist: Distribution) -> None:
        self._dist = dist
        self.points: tuple[EntryPoint, ...] = ()
        self.error: Exception | None = None
        """Why its entry points cannot be read."""
        try:
            self.points = tuple(dist.entry_points)
        except (ValueError, TypeError, AttributeError, OSError) as error:
            # All that importlib.metadata raises for a malformed entry_points.txt.
            self.error = error

    @cached_property
    def identity(self) -> tuple[str, str]:
        """Name and version; a dist without METADATA is named by its folder."""
        try:
            metadata = cast(Any, self._dist.metadata)
            name, version = metadata["Name"], metadata["Version"]
        except (KeyError, TypeError, ValueError, OSError):
            name = version = None
        return str(name or getattr(self._dist, "_path", "a dist without a name")), str(version or "unknown")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One entry point, and the dist that it is of."""

    name: str
    value: str
    dist: str
    version: str
    entry: EntryPoint

    def load(self) -> Any:
        return self.entry.load()


def installed_dists() -> Sequence[InstalledDist]:
    """The dists on `sys.path` that have entry points, or whose entry points cannot be read."""
    return _read(tuple(_folders()))


def entry_points(group: str) -> list[Point]:
    """Entry points of a group, by name. Of two copies of a dist on the path, the first is used, as for imports."""
    result: list[Point] = []
    seen: set[str] = set()
    for one in installed_dists():
        points = [point for point in one.points if point.group == group]
        if not points or canonical(one.identity[0]) in seen:
            continue
        dist, version = one.identity
        seen.add(canonical(dist))
        result += [Point(name=p.name, value=p.value, dist=dist, version=version, entry=p) for p in points]
    return sorted(result, key=lambda point: (point.name, point.value))


def _folders() -> Iterator[tuple[str, int]]:
    """The folders of `sys.path` and when each last changed, as installing and removing a dist does."""
    for entry in dict.fromkeys(sys.path):
        try:
            # A recipe asks hundreds of times.
            yield entry, os.stat(entry or ".").st_mtime_ns  # noqa: PTH116
        except OSError:
            continue


@lru_cache(maxsize=1)
def _read(folders: tuple[tuple[str, int], ...]) -> tuple[InstalledDist, ...]:
    del folders
    return tuple(one for one in map(InstalledDist, distributions()) if one.points or one.error)
