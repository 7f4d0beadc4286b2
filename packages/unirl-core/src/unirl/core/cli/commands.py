"""Commands of the installed dists: entry points of the group `unirl.commands`, `name = "package.module:command"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from ..errors import PluginBroken, PluginConflict, PluginNotInstalled, UniRLError
from ..names import canonical
from ..plugins.entry_points import COMMANDS_GROUP, Point, entry_points
from ..plugins.hookspec import API_GROUP
from .discovery import DISABLE, disabled_names

__all__ = ["CommandPoints", "load_command", "missing_command", "named_commands"]

CommandPoints = Mapping[str, Sequence[Point]]
"""Name of a command -> its entry point, or several where dists disagree."""


def named_commands() -> CommandPoints:
    """The installed commands by name, without those of disabled plugins. Imports none of them."""
    result: dict[str, list[Point]] = {}
    off = _disabled_dists()
    for point in entry_points(COMMANDS_GROUP):
        if canonical(point.dist) not in off:
            result.setdefault(point.name, []).append(point)
    return result


def load_command(points: Sequence[Point]) -> click.Command:
    """The command of an entry point; imports its module.

    Raises PluginConflict for several of one name, PluginBroken when it cannot be imported or is not a command.
    """
    point, *others = points
    label = f"command {point.name!r}"
    if others:
        from ..plugins.catalog import LEAVE_OUT

        dists = " and ".join(f"{one.dist} {one.version}" for one in points)
        raise PluginConflict(f"{label}: provided by {dists}. {LEAVE_OUT}")
    label = f"{label} of {point.dist} {point.version}"
    try:
        result = point.load()
    except (Exception, SystemExit) as error:
        from ..plugins.loading import import_failure

        raise PluginBroken(f"{label}: {import_failure(point.value, dist=point.dist, error=error)}") from error
    if not isinstance(result, click.Command):
        raise PluginBroken(f"{label}: its entry point names {point.value!r}, expected a click command.")
    return result


def missing_command(name: str) -> UniRLError | None:
    """Why a command of the registry is not there, with what to do; None for a name that the registry does not know."""
    from ..plugins.dists import installed_version
    from ..plugins.registry import known_parts

    part = known_parts().part("command", name)
    if part is None:
        return None
    version = installed_version(part.dist)
    if version is None:
        return PluginNotInstalled(f"command {name!r} is not installed. {part.hint[0].upper()}{part.hint[1:]}.")
    if canonical(part.dist) in _disabled_dists():
        return PluginBroken(f"command {name!r}: its plugin {part.dist} is disabled by {DISABLE}.")
    return PluginNotInstalled(
        f"command {name!r}: {part.dist} {version} is installed but does not provide it; upgrade it."
    )


def _disabled_dists() -> set[str]:
    """Canonical names of the dists that the user disabled, by their own name or by that of their plugin."""
    off = {canonical(name) for name in disabled_names()}
    if off:
        off |= {canonical(point.dist) for point in entry_points(API_GROUP) if canonical(point.name) in off}
    return off
