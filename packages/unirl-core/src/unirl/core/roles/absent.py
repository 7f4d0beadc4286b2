"""The error of an optional method that is called without being implemented."""

from __future__ import annotations

from ..errors import PluginBroken

__all__ = ["absent"]


def absent(owner: str, part: object, method: str, whose: str) -> PluginBroken:
    """owner: the kind of part, with its name where it has one.  whose: the parts that promise the method."""
    return PluginBroken(
        f"{owner}: {type(part).__name__} does not implement {method}(), as {owner.partition(' ')[0]}s {whose} do. "
        "Implement it, or change the spec."
    )
